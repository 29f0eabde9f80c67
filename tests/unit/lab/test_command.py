"""`make bench` with workers that only say what workers say, on links of the relay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from algorithms.plan import Plan
from algorithms.presets import PRESETS
from coordinator import Failure
from tests.lab.compare.command import bench
from tests.lab.compare.options import Bench
from tests.lab.compare.session import run_bench
from tests.support import fake_worker

_FAKE = fake_worker.__file__
# The fake worker knows nothing of proxies; and one preset may fail while the others go on.
_PROGRAM = """
import runpy, sys
if "--proxy" in sys.argv:
    at = sys.argv.index("--proxy")
    del sys.argv[at : at + 2]
preset = sys.argv[sys.argv.index("--preset") + 1]
sys.argv += [word for setting in {more!r}.get(preset, []) for word in ("--set", setting)]
sys.argv[0] = {fake!r}
runpy.run_path({fake!r}, run_name="__main__")
"""


def program(**more: list[str]) -> tuple[str, ...]:
    """Runs a fake worker, with further settings by preset."""
    return (sys.executable, "-c", _PROGRAM.format(fake=str(_FAKE), more=more))


def asked(tmp_path: Path, **changes: object) -> Bench:
    plain = {
        "links": ("20mbit", "2mbit"),
        "presets": ("local", "diloco"),
        "workers": 2,
        "steps": 40,
        "link_means": "relay",
        "out": tmp_path / "out",
        "program": program(),
        "root": tmp_path,
    }
    return Bench(**{**plain, **changes})


def test_a_table_per_link_and_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = (tmp_path / "copy.json", tmp_path / "copy.md")
    code = run_bench(asked(tmp_path, systems=("torchft",)), *copies)
    shown = capsys.readouterr()
    assert code == 0
    out = tmp_path / "out"
    document = json.loads((out / "bench.json").read_text())
    assert [link["link"] for link in document["links"]] == ["20mbit", "2mbit"]
    for link in document["links"]:
        local, diloco, torchft = link["rows"]
        assert link["link_means"] == "relay"
        assert (local["steps"], local["relative_speed"], diloco["val_loss"]) == (40, 1.0, 1.5)
        assert torchft["problem"] == "not installed (make bench-peers)"
    for copy, original in zip(copies, ("bench.json", "bench.md"), strict=True):
        assert copy.read_text() == (out / original).read_text()
    assert not (out / "bench.png").exists()  # fake workers leave no events to draw
    assert (out / "2mbit/diloco/report.json").exists()
    assert (out / "2mbit/diloco/swarm.log").stat().st_size > 0
    assert "local      40 steps ... done" in shown.err
    assert shown.out.count("validation") == 2
    assert "started at step" not in shown.out + shown.err  # the live display


def test_a_run_that_is_too_long_does_fewer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 s for 400 steps of the fake `local`; its model of 165 parameters costs nothing to send."""
    run = asked(tmp_path, links=("2mbit",), steps=400, inner_steps=10, limit_s=5.0)
    assert run_bench(run) == 0
    (link,) = json.loads((tmp_path / "out/bench.json").read_text())["links"]
    local, diloco = link["rows"]
    assert (local["steps"], local["val_loss"]) == (400, 1.5)
    assert (diloco["steps"], diloco["val_loss"], diloco["extrapolated"]) == (160, None, True)
    assert "diloco     160 of 400 steps" in capsys.readouterr().err


def test_a_failed_run_is_a_row_and_exit_code_1(tmp_path: Path) -> None:
    run = asked(
        tmp_path,
        links=("20mbit",),
        presets=("ddp", "diloco"),
        program=program(ddp=["fake.crash=w0"]),
    )
    assert run_bench(run) == 1
    (link,) = json.loads((tmp_path / "out/bench.json").read_text())["links"]
    local, ddp, diloco = link["rows"]
    assert "RuntimeError: a defect" in ddp["problem"]
    assert (local["problem"], diloco["problem"]) == (None, None)


def test_what_no_worker_takes_ends_it_but_what_was_measured_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Failure) as failure:
        run_bench(asked(tmp_path, program=program(diloco=["fake.error=w0"])))
    assert failure.value.exit_code == 4
    assert failure.value.message.startswith("preset diloco: no text at /nowhere")
    assert "local" in capsys.readouterr().out


def test_ctrl_c_ends_the_run_in_hand_and_prints_what_was_measured(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waits = program(ddp=["fake.wait=1", f"fake.pipe={pipe}"])
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.lab.compare.options import Bench\n"
        "from tests.lab.compare.session import run_bench\n"
        "sys.exit(run_bench(Bench(links=('20mbit',), workers=2, steps=5, link_means='relay', "
        f"out=Path({str(tmp_path / 'out')!r}), program={waits!r})))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        pipe.open().close()  # returns once ddp trains
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate()
    assert process.returncode == 130, said
    (link,) = json.loads((tmp_path / "out/bench.json").read_text())["links"]
    local, ddp = link["rows"]
    assert (local["val_loss"], ddp["problem"]) == (1.5, "interrupted")
    assert "interrupted" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--link", "20"], 3, "--link: link '20'"),
        (["--link", "w0=20mbit"], 3, "--link: link 'w0=20mbit'"),
        (["--link", "20mbit", "--link", "20mbit"], 2, "--link 20mbit: asked for twice"),
        (["--preset", "ddp", "--preset", "ddp"], 2, "--preset ddp: asked for twice"),
        (["--steps", "0"], 3, "--steps 0: must be at least 1"),
        (["--inner-steps", "0"], 3, "--inner-steps 0: must be at least 1"),
        (["--set", "steps"], 3, "write section.key=value"),
        (["--workers", "1"], 2, "1 is not in the range"),
        (["--limit", "0"], 2, "0.0 is not in the range"),
        (["--peers", "none", "--peers", "torchft"], 2, "--peers none: none, and others"),
        (["--out", "full"], 2, "--out full: is there already"),
        (["--json", "nowhere/bench.json"], 2, "there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_code(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    outcome = CliRunner().invoke(bench, arguments, standalone_mode=False)
    assert isinstance(outcome.exception, click.ClickException)
    assert outcome.exception.exit_code == code
    assert words in outcome.exception.format_message()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("preset", "plan"), PRESETS.items(), ids=PRESETS)
def test_the_period_of_a_preset_is_its_own_before_a_run(
    tmp_path: Path, preset: str, plan: Plan
) -> None:
    assert asked(tmp_path).period_steps(preset) == plan.inner_steps


def test_what_is_known_of_the_period_before_a_run(tmp_path: Path) -> None:
    chosen = asked(tmp_path, settings=("diloco.inner_steps=50", "task.model=small"))
    assert [chosen.period_steps(name) for name in ("ddp", "torch-ddp", "diloco", "torchft")] == [
        *(1, 1, 50, 50)
    ]
    assert asked(tmp_path).period_steps("hivemind") == PRESETS["diloco"].inner_steps
    assert asked(tmp_path, inner_steps=7).period_steps("streaming") == 7
    assert chosen.unshared_setting() == "task.model=small"
    assert chosen.folder("ddp", "20mbit,delay=50ms").name == "ddp"
    assert chosen.folder("ddp", "20mbit,delay=50ms").parent.name == "20mbit-delay-50ms"


def test_a_comparison_asks_for_all_its_presets() -> None:
    bench = Bench(presets=("ddp", "local"), settings=("x.y=1",), out=Path("o"))
    assert bench.request()["presets"] == ["local", "ddp"]
    assert bench.request()["settings"][-1] == "x.y=1"
