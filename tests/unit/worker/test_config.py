"""A run's TOML: what it may say, and the one line for everything else."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.config import Config, load_config, parse_config, task_of, to_document
from murmuration.worker.errors import ConfigError
from murmuration.worker.node.admission import join_config
from murmuration.worker.tasks import TaskError


def config_error(*settings: str, path: Path | None = None, preset: str | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, settings, preset)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    path = tmp_path / "run.toml"
    return lambda text: path.write_text(text) and path


def test_a_file_is_read_and_settings_go_on_top(toml):
    run, task = "[run]\nseed = 7\nsteps = 90", '[task]\nmodel = "small"\nsizes = {hidden = 32}'
    plan, membership = "[diloco]\ninner_steps = 10\nouter_lr = 1", "[membership]\ngossip_s = 0.5"
    path = toml("\n".join((run, task, plan, membership)))
    config = load_config(path, ["run.steps=100", "task.batch_size=2"])
    assert (config.run.seed, config.run.steps) == (7, 100)
    assert config.task.options == {"model": "small", "sizes": {"hidden": 32}, "batch_size": 2}
    assert (config.plan.inner_steps, config.plan.outer_lr) == (10, 1.0)
    assert isinstance(config.plan.outer_lr, float)
    assert config.membership.gossip_s == 0.5


def test_a_preset_on_the_command_line_wins_over_the_files(toml):
    path = toml('[diloco]\npreset = "local"\ninner_steps = 9\n')
    assert load_config(path, ()).preset == "local"
    config = load_config(path, (), "diloco")
    assert (config.preset, config.plan.exchange, config.plan.inner_steps) == ("diloco", "mean", 9)
    config = load_config(None, ["diloco.inner_steps=50"], "ddp")  # which is its own period
    assert config.plan == PRESETS["ddp"]


def test_a_setting_is_toml_or_else_plain_text():
    for text, value in [
        ("3", 3),
        ("2.5", 2.5),
        ("true", True),
        ('"quoted"', "quoted"),
        ("plain", "plain"),
        ("/some/where.txt", "/some/where.txt"),
        ("a=b", "a=b"),
        ("", ""),
        ("[1, 2]", [1, 2]),
        ("{a = 1, b = {c = 2}}", {"a": 1, "b": {"c": 2}}),
    ]:
        assert load_config(None, [f"task.option={text}"]).task.options == {"option": value}


FORM = "write section.key=value, such as diloco.inner_steps=50"
PRESET_NAMES = (
    "use one of diloco, streaming, co2, onebit, sparse, noloco, streaming-noloco, kseed, ddp, local"
)


def test_a_setting_that_cannot_be_is_named_in_one_line():
    for setting, line in [
        ("run.sed=1", "[run] has no key 'sed'; did you mean 'seed'?"),
        ("diloco.prset=1", "[diloco] has no key 'prset'; did you mean 'preset'?"),
        ("run.zzz=1", "[run] has no key 'zzz'; use one of seed, steps, evaluate_every, track"),
        ("diloco.preset=diloc", "no preset 'diloc'; did you mean 'diloco'?"),
        *((f"diloco.preset={value}", "preset") for value in ("3", "true", "[1]", "{a = 1}")),
        *((f"task.name={name}", "name") for name in ("3", "true", '["llama-bytes"]', "{a = 1}")),
        ("run.steps=many", "[run] steps is 'many'; it must be of type int"),
        ("run.steps=true", "[run] steps is True; it must be of type int"),
        ("inner.lr=fast", "[inner] lr is 'fast'; it must be of type float"),
        ("run.steps=0", "[run] steps is 0; it must be at least 1"),
        *((f"run.seed={seed}", "seed") for seed in (2**64, -(2**64))),
        ("run.evaluate_every=-1", "evaluate_every is -1; it must be at least 0"),
        ('run.track=["tb"]', "track names 'tb'; use some of tensorboard, wandb"),
        ("diloco.inner_steps=0", "[diloco] inner_steps (H) is 0; it must be at least 1"),
        ("rounds.quorum=1.5", "[rounds] quorum is 1.5; it must be above 0, at most 1"),
        ("rounds.aggregation=centered", "use one of mean, trimmed"),
        ("rounds.norm_limit=0.5", "norm_limit is 0.5; it must be at least 1"),
        ("checkpoint.every_s=0", "[checkpoint] every_s is 0.0; it must be above 0"),
        ("checkpoint.keep=1", "[checkpoint] keep is 1; it must be at least 2, one to fall back on"),
        ("task.data=x", "[task] data is 'x'; use drawn or leased"),
        *(
            (other, FORM)
            for other in ("", "run", "run.steps", "steps=3", ".steps=3", "run.=3", "=")
        ),
    ]:
        said = config_error(setting)
        assert said.startswith(f"--set {setting}: ")
        assert line in said


def test_settings_that_do_not_go_together_are_refused():
    for settings, line in [
        ("stages.count=4 diloco.dylu=true", "dylu"),  # stages go through iterations together
        ("stages.count=4 run.evaluate_every=50", "[run] evaluate_every is for whole models"),
        ("stages.count=4 task.data=leased", '[task] data = "leased" is for whole models'),
        *(
            (f"rounds.aggregation=trimmed {other}", "leave out exchange, weighting and mean_over")
            for other in ("diloco.exchange=pairs", "diloco.mean_over=senders")
        ),
    ]:
        first, second = settings.split()
        said = config_error(first, second)
        assert line in said
        assert first in said or second in said, settings


def test_what_a_file_cannot_say_is_named(toml):
    for text, line in [
        (
            "[diloco]\ninner_step = 5",
            "[diloco] has no key 'inner_step'; did you mean 'inner_steps'?",
        ),
        ("[dilocco]\ninner_steps = 50", "no section [dilocco]; did you mean 'diloco'?"),
        ("run = 3", "run is a section; write [run] and keys below it"),
    ]:
        path = toml(text)
        assert config_error(path=path) == f"{path}: {line}"
    path = toml("run = 3\ndiloco = 3\n")
    assert config_error("run.seed=1", path=path) == "--set run.seed=1: run is not a section"
    assert "diloco is" in config_error(path=path, preset="ddp")
    assert config_error(preset="zzz") == f"--preset zzz: no preset 'zzz'; {PRESET_NAMES}"


def test_who_has_said_it_is_named(toml):
    path = toml('[run]\nsteps = 0\n[stages]\ncount = 4\nrouting = "full"\n')
    assert config_error(path=path) == f"{path}: [run] steps is 0; it must be at least 1"
    assert config_error("run.steps=-1", path=path).startswith("--set run.steps=-1: [run] steps")
    both = config_error("run.steps=9", "stages.skip=0.25", path=path)
    assert both.startswith(f"{path} and --set stages.skip=0.25: [stages] routing 'full' visits")
    path.write_text("[runn]\nsteps = 3\n")
    assert config_error("runn.seed=3", path=path).startswith(f"{path} and --set runn.seed=3: no")
    assert config_error("run.seed=3", path=path).startswith(f"{path}: no section [runn]")
    flags = {"run.steps=-1": "--steps -1"}
    with pytest.raises(ConfigError, match=r"^--steps -1: \[run\] steps"):
        load_config(None, ["stages.count=4", *flags], None, flags)


def test_no_setting_may_be_nan():
    config = Config()
    sections = {"diloco": config.plan}
    sections |= {s: getattr(config, s) for s in ("inner", "rounds", "membership", "checkpoint")}
    for section, defaults in sections.items():
        for name, value in dataclasses.asdict(defaults).items():
            if isinstance(value, float):
                config_error(f"{section}.{name}=nan")


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path, toml):
    missing = tmp_path / "missing.toml"
    assert config_error(path=missing) == f"{missing}: cannot be read: No such file or directory"
    assert config_error(path=toml("[run\n")).startswith(f"{tmp_path / 'run.toml'}: not TOML: ")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "run.toml: not UTF-8, as TOML is" in config_error(path=tmp_path / "run.toml")
    assert "it is a folder; name the TOML file" in config_error(path=tmp_path)
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    assert "Too many levels of symbolic links" in config_error(path=tmp_path / "loop.toml")
    (tmp_path / "run.toml").write_text("[run]\nsteps = 7\n", encoding="utf-8-sig")
    assert load_config(tmp_path / "run.toml", []).run.steps == 7


def test_trackers_are_this_machines_own():
    """A joiner does not take from others what it would load for them."""
    config = load_config(None, ['run.track=["wandb"]'])
    assert config.run.track == ("wandb",)
    sections = to_document(config)
    assert "track" not in sections["run"]
    sections["run"]["track"] = ["wandb"]
    assert join_config(sections, None, [], "there").run.track == ()
    own = join_config(sections, None, ['run.track=["trackio"]'], "there")
    assert own.run.track == ("trackio",)


def test_leased_samples_are_a_setting_of_runs_that_have_it_and_of_tasks_with_a_loader():
    assert "data" not in to_document(Config())["task"]
    leased = load_config(None, ["task.data=leased"])
    assert leased.task.options == {}
    assert parse_config(to_document(leased), "there") == leased
    name = "tests.support.statistics_task:Normalised"
    config = load_config(None, [f"task.name={name}", "task.data=leased"])
    with pytest.raises(TaskError, match=r"--set task.data=leased: data = .* has no loader\(\)"):
        task_of(config)


def test_the_machines_own_sections_are_not_run_wide():
    config = load_config(None, ["rounds.quorum=1", "membership.gossip_s=9", "checkpoint.keep=5"])
    assert to_document(config) == to_document(Config())
    assert math.isclose(config.rounds.quorum, 1.0)
