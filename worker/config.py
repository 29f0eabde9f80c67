"""A run's TOML file: one section per owner, unknown keys refused with the nearest valid name.

`[run] [task] [inner] [stages] [diloco]` are run-wide: they make the manifest. The rest is the
machine's own, and so is what `ADVISED` names.
"""

import dataclasses
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from murmuration.algorithms.codecs import CODECS
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.errors import ConfigError
from murmuration.worker.exchange.measured import ExchangeConfig
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.tasks import SharesSamples, Task, TaskError, load_task
from murmuration.worker.tasks.task import nearest
from murmuration.worker.training.optimizers import KSEED, InnerConfig
from murmuration.worker.views.tracking import TRACKERS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

CODEC_NAMES = tuple(codec.name for codec in CODECS)


@dataclass(frozen=True)
class ConfigOrigin:
    """The file or command line that values are from."""

    name: str  # of the file, or of whatever else the values are from
    written: frozenset[tuple[str, str]] = frozenset()  # (section, key) of each value in that file
    # By (section, key), the flag and value of what the command line said on top.
    typed: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def of(self, section: str, keys: Iterable[str]) -> str:
        """Says where these are from: the file, flags as typed, or both."""
        places = [(section, key) for key in keys]
        flags = dict.fromkeys(self.typed[place] for place in places if place in self.typed)
        names = [] if flags and self.written.isdisjoint(places) else [self.name]
        return " and ".join([*names, *flags])

    def of_named(self, section: str, said: str, otherwise: str = "") -> str:
        """Where the keys are from that an error names; `otherwise`, if it names none."""
        known = {key for part, key in (*self.written, *self.typed) if part == section}
        return self.of(section, sorted(known.intersection(re.findall(r"\w+", said))) or [otherwise])

    def refused(self, section: str, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.of(section, [key])}: [{section}] {why}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    seed: int = 0  # of the model and all streams of samples
    steps: int = 1600
    # Inner steps between two measurements of the anchor's held-out loss; 0: none before the end.
    evaluate_every: int = 0
    # Names of `TRACKERS` that this machine's worker tells of its figures.
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be 0 to 2^63 - 1")
        if self.evaluate_every < 0:
            raise ValueError(f"evaluate_every is {self.evaluate_every}; it must be at least 0")
        if others := [name for name in self.track if name not in TRACKERS]:
            raise ValueError(f"track names {others[0]!r}; use some of {', '.join(TRACKERS)}")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    name: str = "llama-bytes"  # a built-in task or `package.module:factory`
    # `drawn`: each peer draws samples of its own, in its own order; `leased`: each sample of an
    # epoch is drawn by one peer.
    data: str = "drawn"
    # A folder or file that the model's first values are read from; empty: they are drawn.
    init: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # the factory's keywords


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    # Seconds between two checkpoints; more where they would take 3 % of the time.
    every_s: float = 10.0
    keep: int = 2  # how many stay (at least 2)
    # A folder or URL of this worker alone, as fsspec takes it; empty: nothing is copied.
    copy_to: str = ""
    copy_every_s: float = 600.0  # seconds between two copies; the last checkpoint is copied too

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise ValueError(f"every_s is {self.every_s}; it must be above 0")
        if self.copy_every_s < 0:
            raise ValueError(f"copy_every_s is {self.copy_every_s}; it must be at least 0")
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; it must be at least 2, one to fall back on")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run's TOML says, and where each value is from."""

    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    preset: str = "diloco"
    plan: Plan = PRESETS["diloco"]
    rounds: RoundConfig = field(default_factory=RoundConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    source: ConfigOrigin = field(default=ConfigOrigin("the defaults"), compare=False, repr=False)


RUN_WIDE = ("run", "task", "inner", "stages", "diloco")
# Run-wide keys in which peers may differ.
ADVISED = (
    ("diloco", "overlap"),
    ("diloco", "overlap_steps"),
    ("run", "evaluate_every"),
    ("stages", "memory_mib"),
    ("task", "init"),
)
# Run-wide keys that are never taken from others, and not told them.
LOCAL = (("run", "track"),)
# What a preset says of the inner optimizer.
_INNER = {"kseed": InnerConfig(optimizer=KSEED, lr=3e-3, warmup_steps=0)}
# Keys that a model in stages does not have.
_NOT_IN_STAGES = {
    "dylu": "dylu gives each peer inner steps of its own, but the stages of a model go through "
    "iterations together; leave dylu out, or do not cut the model",
    "optimizer": "optimizer = 'kseed' is for whole models; use another, or do not cut the model",
    "accumulate": "accumulate is for whole models; stages take the mean over [stages] microbatches",
    "evaluate_every": "evaluate_every is for whole models; stages are put together at the end of "
    "the run, and evaluated then",
    "data": 'data = "leased" is for whole models; leave it out, or do not cut the model',
}
_SECTIONS = (*RUN_WIDE, "rounds", "exchange", "membership", "checkpoint")


def load_config(
    path: Path | None,
    settings: Iterable[str],
    preset: str | None = None,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """Reads a run's TOML and applies `section.key=value` settings on top. Args: settings: as given
    with `--set`; values are TOML, or else plain text; preset: wins over the file's; flags: how
    settings were typed that were not given with `--set`. Raises ConfigError: with the file or flag,
    the key, and the fix."""
    settings, flags = [*settings], dict(flags or {})
    if preset is not None:
        settings.append(f'diloco.preset="{preset}"')
        flags[settings[-1]] = f"--preset {preset}"
    return parse_config(*read_all(path, settings, flags))


def parse_config(document: Mapping[str, Any], source: ConfigOrigin | str) -> Config:
    """Makes a Config of plain nested values, which came from `source`. Raises ConfigError."""
    if isinstance(source, str):
        source = ConfigOrigin(source)
    for name, section in document.items():
        if name not in _SECTIONS:
            where = source.of(name, section if isinstance(section, dict) else ())
            raise ConfigError(f"{where}: no section [{name}]{nearest(name, _SECTIONS)}")
        if not isinstance(section, dict):
            raise ConfigError(
                f"{source.name}: {name} is a section; write [{name}] and keys below it"
            )
    diloco = dict(document.get("diloco", {}))
    preset = diloco.pop("preset", "diloco")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(
            f"{source.of('diloco', ['preset'])}: no preset {preset!r}"
            f"{nearest(str(preset), PRESETS)}"
        )
    if preset == "ddp":
        # A DDP step is its own round, whatever period a comparison was started with.
        diloco.pop("inner_steps", None)
    usual, period = PRESETS[preset], diloco.get("inner_steps")
    if usual.overlap_steps and type(period) is int and period > 0:
        # The preset's overlap is a share of its period.
        share = usual.overlap_steps * period // usual.inner_steps
        diloco.setdefault("overlap_steps", max(1, share))
    given = {**document, "diloco": diloco}
    config = Config(
        run=_build(RunConfig(), "run", given, source),
        task=_task(dict(document.get("task", {})), source),
        inner=_build(_INNER.get(preset, InnerConfig()), "inner", given, source),
        stages=_build(StagesConfig(), "stages", given, source),
        preset=preset,
        plan=_build(usual, "diloco", given, source, extra=("preset",)),
        rounds=_build(RoundConfig(), "rounds", given, source),
        exchange=_build(ExchangeConfig(), "exchange", given, source),
        membership=_build(MembershipConfig(), "membership", given, source),
        checkpoint=_build(CheckpointConfig(), "checkpoint", given, source),
        source=source,
    )
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    inner, plan, source = config.inner, config.plan, config.source
    for section, key, is_set in (
        ("diloco", "dylu", plan.dylu),
        ("inner", "optimizer", inner.optimizer == KSEED),
        ("inner", "accumulate", inner.accumulate > 1),
        ("run", "evaluate_every", config.run.evaluate_every > 0),
        ("task", "data", config.task.data == "leased"),
    ):
        if is_set and config.stages.count > 1:
            raise source.refused(section, key, _NOT_IN_STAGES[key])
    alike = (plan.exchange, plan.weighting, plan.mean_over) == ("mean", "uniform", "all")
    if config.rounds.aggregation != "mean" and not alike:
        why = (
            f'aggregation = "{config.rounds.aggregation}" is for means over all in which all count '
            "alike; leave out exchange, weighting and mean_over"
        )
        raise source.refused("rounds", "aggregation", why)


def _task(options: dict[str, Any], source: ConfigOrigin) -> TaskConfig:
    name = options.pop("name", TaskConfig.name)
    if not isinstance(name, str):
        raise source.refused("task", "name", f"name is {name!r}; it must be of type str")
    init = options.pop("init", TaskConfig.init)
    if not isinstance(init, str):
        raise source.refused("task", "init", f"init is {init!r}; it must be a folder or a file")
    data = options.pop("data", TaskConfig.data)
    if data not in ("drawn", "leased"):
        instead = "use drawn or leased, and another name for an option of the task's own"
        raise source.refused("task", "data", f"data is {data!r}; {instead}")
    for key, value in options.items():
        if not _is_plain(value):
            why = f"{key} is {value!r}; use text, numbers, lists, tables"
            raise source.refused("task", key, why)
    return TaskConfig(name=name, data=data, init=init, options=options)


def task_of(config: Config) -> Task:
    """Loads the run's task. Raises TaskError, with the file or flag; also without a loader."""
    with whose_task(config):
        task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
        if config.task.data == "leased" and not isinstance(task, SharesSamples):
            raise TaskError(
                f'data = "leased": the task {config.task.name!r} has no loader() of its samples; '
                "give it one, or leave data out"
            )
        return task


@contextmanager
def whose_task(config: Config) -> Iterator[None]:
    """Says of a TaskError where the option that it names, or else the task's name, is from."""
    try:
        yield
    except TaskError as error:
        where = config.source.of_named("task", str(error), otherwise="name")
        raise type(error)(f"{where}: {error}") from error


def fragments_of(
    schema: Sequence[TensorSpec], config: Config, held: str = ""
) -> tuple[Fragment, ...]:
    """Cuts what is exchanged as the plan says; `held` is how an error names it. Raises ConfigError:
    fewer layers, or a period too short for them."""
    try:
        fragments = config.plan.cut(schema)
        config.plan.schedule(fragments=len(fragments), steps=config.run.steps)
    except ValueError as error:
        where = config.source.of_named("diloco", str(error), otherwise="fragments")
        raise ConfigError(f"{where}: {held}[diloco] {error}") from error
    return fragments


def to_document(config: Config) -> dict[str, Any]:
    """Gives the run-wide sections as plain values, which `parse_config` takes back."""
    task = config.task
    data = {"data": task.data} if task.data != TaskConfig.data else {}
    run = dataclasses.asdict(config.run)
    for _, key in LOCAL:
        del run[key]
    return {
        "run": run,
        "task": {"name": task.name, "init": task.init, **data, **task.options},
        "inner": dataclasses.asdict(config.inner),
        "stages": {**dataclasses.asdict(config.stages), "layers": list(config.stages.layers)},
        "diloco": {"preset": config.preset, **dataclasses.asdict(config.plan)},
    }


def read_all(
    path: Path | None, settings: Iterable[str], flags: Mapping[str, str]
) -> tuple[dict[str, Any], ConfigOrigin]:
    """Reads the file, the settings on top, and where each value is from. Raises ConfigError."""
    document = _read(path) if path else {}
    written = {
        (name, key) for name, part in document.items() if isinstance(part, dict) for key in part
    }
    typed: dict[tuple[str, str], str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot or not section or not name:
            raise ConfigError(
                f"--set {setting}: write section.key=value, such as diloco.inner_steps=50"
            )
        target = document.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {setting}: {section} is not a section")
        try:
            target[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            target[name] = text
        typed[section, name] = flags.get(setting, f"--set {setting}")
    name = str(path) if path else "the defaults"
    return document, ConfigOrigin(name, frozenset(written - typed.keys()), typed)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: it is a folder; name the TOML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8, as TOML is; save it as that") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _build(
    default: T,
    section: str,
    document: Mapping[str, Any],
    source: ConfigOrigin,
    extra: tuple[str, ...] = (),
) -> T:
    """Replaces the fields of `default` that a section has, each checked for name and type."""
    known = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    checked: dict[str, Any] = {}
    values = document.get(section, {})
    for name, value in values.items():
        if name not in known:
            why = f"has no key {name!r}{nearest(name, (*known, *extra))}"
            raise source.refused(section, name, why)
        wanted, problem = type(known[name]), ""
        if wanted is float and type(value) is int:
            value = float(value)
        if wanted is tuple and type(value) is list:
            value = tuple(value)
        if type(value) is not wanted:
            kind = "list" if wanted is tuple else wanted.__name__
            why = f"{name} is {value!r}; it must be of type {kind}"
            raise source.refused(section, name, why)
        if isinstance(value, int) and abs(value) >= 1 << 63:
            problem = "be less than 2^63"
        if isinstance(value, float) and not math.isfinite(value):
            problem = "be a finite number"
        if problem:
            raise source.refused(section, name, f"{name} is {value}; it must {problem}")
        checked[name] = value
    try:
        return dataclasses.replace(default, **checked)
    except ValueError as error:
        # The flag of the key that the error begins with, else all.
        first = str(error).split(maxsplit=1)[0]
        keys = [first] if (section, first) in source.typed else (*values, *extra)
        raise ConfigError(f"{source.of(section, keys)}: [{section}] {error}") from error


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | bool | int | float)
