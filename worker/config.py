"""A run's TOML file: one section per owner, unknown keys refused with the nearest valid name.

    [run]         seed, steps, how often the held-out loss is measured
    [task]        name, and the task's own options
    [inner]       the inner optimizer
    [stages]      how the model is cut, and how microbatches are routed
    [diloco]      preset, and the plan's fields where they differ from the preset's
    [rounds]      when a round closes
    [exchange]    what travels, and how
    [membership]  the failure detector
    [checkpoint]  how often, how many

`[run] [task] [inner] [stages] [diloco]` are run-wide: they make the manifest. The rest is the
machine's own, and so is what `ADVISED` names.
"""

import dataclasses
import difflib
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
from murmuration.worker.training.optimizers import KSEED, InnerConfig
from murmuration.worker.views.tracking import TRACKERS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

CODEC_NAMES = tuple(codec.name for codec in CODECS)


@dataclass(frozen=True)
class ConfigOrigin:
    """Args:
    name: of the file, or of whatever else the values are from.
    written: (section, key) of each value in that file.
    typed: by (section, key), the flag and value of what the command line said on top.
    """

    name: str
    written: frozenset[tuple[str, str]] = frozenset()
    typed: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def of(self, section: str, keys: Iterable[str]) -> str:
        """Where these are from: the file, flags as typed, or both."""
        places = [(section, key) for key in keys]
        flags = dict.fromkeys(self.typed[place] for place in places if place in self.typed)
        names = [] if flags and self.written.isdisjoint(places) else [self.name]
        return " and ".join([*names, *flags])

    def of_named(self, section: str, said: str, otherwise: str = "") -> str:
        """Where the keys are from that an error names; `otherwise`, if it names none."""
        known = {key for part, key in (*self.written, *self.typed) if part == section}
        return self.of(section, sorted(known.intersection(re.findall(r"\w+", said))) or [otherwise])

    def of_error(self, section: str, keys: Iterable[str], said: str) -> str:
        """Where what is wrong is from: the flag of the key that the error begins with, else all."""
        first = said.split(maxsplit=1)[0]
        return self.of(section, [first] if (section, first) in self.typed else keys)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Args:
    seed: of the model and all streams of samples; steps: inner steps of the run.
    evaluate_every: inner steps between two measurements of the anchor's held-out loss on the way;
        0: only at the end.
    track: trackers that this machine's worker tells of its figures, of `TRACKERS`.
    """

    seed: int = 0
    steps: int = 1600
    evaluate_every: int = 0
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
    """Args:
    name: a built-in task or `package.module:factory`.
    data: `drawn`: each peer draws samples of its own, in its own order; `leased`: each sample of an
        epoch is drawn by one peer.
    init: a folder or file that the model's first values are read from; empty: they are drawn.
    options: the factory's keywords.
    """

    name: str = "llama-bytes"
    data: str = "drawn"
    init: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Args:
    every_s: seconds between two checkpoints; more where they would take 3 % of the time.
    keep: how many stay (at least 2).
    copy_to: a folder or URL of this worker alone, as fsspec takes it; empty: nothing is copied.
    copy_every_s: seconds between two copies. The last checkpoint is copied too.
    """

    every_s: float = 10.0
    keep: int = 2
    copy_to: str = ""
    copy_every_s: float = 600.0

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
# Of these, what peers need not have in common.
ADVISED = (
    ("diloco", "overlap"),
    ("diloco", "overlap_steps"),
    ("run", "evaluate_every"),
    ("stages", "memory_mib"),
    ("task", "init"),
)
# Of these, what is never taken from others, and not told them.
LOCAL = (("run", "track"),)
# What a preset says of the inner optimizer.
_INNER = {"kseed": InnerConfig(optimizer=KSEED, lr=3e-3, warmup_steps=0)}
_SECTIONS = (*RUN_WIDE, "rounds", "exchange", "membership", "checkpoint")


def load_config(
    path: Path | None,
    settings: Iterable[str],
    preset: str | None = None,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """Reads a run's TOML and applies `section.key=value` settings on top.

    Args:
        path: the file; None takes the defaults.
        settings: as given with `--set`; values are TOML, or else plain text.
        preset: wins over the file's.
        flags: how settings were typed that were not given with `--set`.

    Raises:
        ConfigError: with the file or flag, the key, and the fix.
    """
    settings, flags = [*settings], dict(flags or {})
    if preset is not None:
        settings.append(f'diloco.preset="{preset}"')
        flags[settings[-1]] = f"--preset {preset}"
    return parse_config(*read_all(path, settings, flags))


def parse_config(document: Mapping[str, Any], source: ConfigOrigin | str) -> Config:
    """From plain nested values, which came from `source`, to a Config. Raises ConfigError."""
    if isinstance(source, str):
        source = ConfigOrigin(source)
    for name, section in document.items():
        if name not in _SECTIONS:
            where = source.of(name, section if isinstance(section, dict) else ())
            raise ConfigError(f"{where}: no section [{name}]{_nearest(name, _SECTIONS)}")
        if not isinstance(section, dict):
            raise ConfigError(
                f"{source.name}: {name} is a section; write [{name}] and keys below it"
            )
    diloco = dict(document.get("diloco", {}))
    preset = diloco.pop("preset", "diloco")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(
            f"{source.of('diloco', ['preset'])}: no preset {preset!r}"
            f"{_nearest(str(preset), PRESETS)}"
        )
    if preset == "ddp":
        # A DDP step is its own round, whatever period a comparison was started with.
        diloco.pop("inner_steps", None)
    usual, period = PRESETS[preset], diloco.get("inner_steps")
    if usual.overlap_steps and type(period) is int and period > 0:
        # The preset's overlap is a share of its period.
        share = usual.overlap_steps * period // usual.inner_steps
        diloco.setdefault("overlap_steps", max(1, share))
    stages = _build(StagesConfig(), document.get("stages", {}), "stages", source)
    plan = _build(PRESETS[preset], diloco, "diloco", source, extra=("preset",))
    if plan.dylu and stages.count > 1:
        raise ConfigError(
            f"{source.of('diloco', ['dylu'])}: [diloco] dylu gives each peer inner steps of its "
            "own, but the stages of a model go through iterations together; leave dylu out, or do "
            "not cut the model"
        )
    inner = _build(_INNER.get(preset, InnerConfig()), document.get("inner", {}), "inner", source)
    if inner.optimizer == KSEED and stages.count > 1:
        raise ConfigError(
            f"{source.of('inner', ['optimizer'])}: [inner] optimizer = 'kseed' is for whole "
            "models; use another, or do not cut the model"
        )
    if inner.accumulate > 1 and stages.count > 1:
        raise ConfigError(
            f"{source.of('inner', ['accumulate'])}: [inner] accumulate is for whole models; stages "
            "take the mean over [stages] microbatches"
        )
    run = _build(RunConfig(), document.get("run", {}), "run", source)
    if run.evaluate_every and stages.count > 1:
        raise ConfigError(
            f"{source.of('run', ['evaluate_every'])}: [run] evaluate_every is for whole models; "
            "stages are put together at the end of the run, and evaluated then"
        )
    task = _task(dict(document.get("task", {})), source)
    if task.data == "leased" and stages.count > 1:
        raise ConfigError(
            f'{source.of("task", ["data"])}: [task] data = "leased" is for whole models; leave it '
            "out, or do not cut the model"
        )
    rounds = _build(RoundConfig(), document.get("rounds", {}), "rounds", source)
    alike = (plan.exchange, plan.weighting, plan.mean_over) == ("mean", "uniform", "all")
    if rounds.aggregation != "mean" and not alike:
        where = source.of("rounds", ["aggregation"])
        raise ConfigError(
            f'{where}: [rounds] aggregation = "{rounds.aggregation}" is for means over all in '
            "which all count alike; leave out exchange, weighting and mean_over"
        )
    return Config(
        run=run,
        task=task,
        inner=inner,
        stages=stages,
        preset=preset,
        plan=plan,
        rounds=rounds,
        exchange=_build(ExchangeConfig(), document.get("exchange", {}), "exchange", source),
        membership=_build(MembershipConfig(), document.get("membership", {}), "membership", source),
        checkpoint=_build(CheckpointConfig(), document.get("checkpoint", {}), "checkpoint", source),
        source=source,
    )


def _task(options: dict[str, Any], source: ConfigOrigin) -> TaskConfig:
    name = options.pop("name", TaskConfig.name)
    if not isinstance(name, str):
        raise ConfigError(
            f"{source.of('task', ['name'])}: [task] name is {name!r}; it must be of type str"
        )
    init = options.pop("init", TaskConfig.init)
    if not isinstance(init, str):
        raise ConfigError(
            f"{source.of('task', ['init'])}: [task] init is {init!r}; it must be a folder or a file"
        )
    data = options.pop("data", TaskConfig.data)
    if data not in ("drawn", "leased"):
        raise ConfigError(
            f"{source.of('task', ['data'])}: [task] data is {data!r}; use drawn or leased, and "
            "another name for an option of the task's own"
        )
    for key, value in options.items():
        if not _is_plain(value):
            raise ConfigError(
                f"{source.of('task', [key])}: [task] {key} is {value!r}; use text, numbers, lists, "
                "tables"
            )
    return TaskConfig(name=name, data=data, init=init, options=options)


def task_of(config: Config) -> Task:
    """The run's task. Raises TaskError: as `load_task`, or its samples cannot be leased as `data`
    says; with the file or flag, as `whose_task`."""
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
    """As the plan has them. Raises ConfigError: fewer layers, or a period too short for them.

    Args:
        schema: what is exchanged; held: how an error names it.
    """
    try:
        fragments = config.plan.cut(schema)
        config.plan.schedule(fragments=len(fragments), steps=config.run.steps)
    except ValueError as error:
        where = config.source.of_named("diloco", str(error), otherwise="fragments")
        raise ConfigError(f"{where}: {held}[diloco] {error}") from error
    return fragments


def to_document(config: Config) -> dict[str, Any]:
    """The run-wide sections as plain values; `parse_config` takes them back."""
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
    """The file with the settings on top, and where each value is from. Raises ConfigError."""
    document = _read(path) if path else {}
    written = {
        (name, key) for name, part in document.items() if isinstance(part, dict) for key in part
    }
    typed: dict[tuple[str, str], str] = {}
    for setting in settings:
        typed[_apply_setting(document, setting)] = flags.get(setting, f"--set {setting}")
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


def _apply_setting(document: dict[str, Any], setting: str) -> tuple[str, str]:
    """Returns the section and key that it sets. Raises ConfigError."""
    key, equals, text = setting.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name:
        raise ConfigError(
            f"--set {setting}: write section.key=value, such as diloco.inner_steps=50"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target = document.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"--set {setting}: {section} is not a section")
    target[name] = value
    return section, name


def _build(
    default: T,
    values: Mapping[str, Any],
    section: str,
    source: ConfigOrigin,
    extra: tuple[str, ...] = (),
) -> T:
    """`default` with the given fields replaced, each checked for name and type."""
    known = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(
                f"{source.of(section, [name])}: [{section}] has no key {name!r}"
                f"{_nearest(name, (*known, *extra))}"
            )
        wanted = type(known[name])
        if wanted is float and type(value) is int:
            value = float(value)
        if wanted is tuple and type(value) is list:
            value = tuple(value)
        if type(value) is not wanted:
            kind = "list" if wanted is tuple else wanted.__name__
            raise ConfigError(
                f"{source.of(section, [name])}: [{section}] {name} is {value!r}; "
                f"it must be of type {kind}"
            )
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ConfigError(
                f"{source.of(section, [name])}: [{section}] {name} is {value}; it must be less "
                "than 2^63"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{source.of(section, [name])}: [{section}] {name} is {value}; "
                "it must be a finite number"
            )
        checked[name] = value
    try:
        return dataclasses.replace(default, **checked)
    except ValueError as error:
        where = source.of_error(section, (*values, *extra), str(error))
        raise ConfigError(f"{where}: [{section}] {error}") from error


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | bool | int | float)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; use one of {', '.join(names)}"
