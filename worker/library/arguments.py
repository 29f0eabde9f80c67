"""The arguments of `Swarm`: checked one by one, and what they and the run agree on."""

import argparse
import inspect
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
import numpy as np
import torch

from murmuration.algorithms.fragments import TensorSpec
from murmuration.protos.addresses import split_address
from murmuration.protos.documents import first_difference
from murmuration.protos.events import NO_END
from murmuration.protos.figures import is_utf8
from murmuration.protos.files import print_line
from murmuration.worker.cli.options import RunFlags
from murmuration.worker.config import Config, load_config
from murmuration.worker.errors import ConfigError, ManifestRefused, MurmurError, UsageError
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.manifest import Manifest
from murmuration.worker.node.admission import FirstAnswer, Newcomer, check_version, join_config
from murmuration.worker.node.own_address import ROUTER, Addresses
from murmuration.worker.tasks import OWN_LOOP
from murmuration.worker.tasks.task import nearest
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.views.lines import PlainLines, describe

_SWITCHES = ("insecure", "no_relay")
_OTHER_NAMES = {"metrics": "serve_metrics", "set": "settings"}
_COMMAND = re.compile(r"(`[^`]*`)")
_VALUE = r"(?:[ =](\d+(?:\.\d+)?|[A-Z]+:[A-Z]+|[^\s;,()]*[:/][^\s;,():]+?)(?=[:;,.)]*(?:\s|$)))?"
_OPTION = re.compile(rf"--([a-z]+(?:-[a-z]+)*)\b{_VALUE}")
_WARNINGS = frozenset({"warning", "put_back", "round_failed"})
_OFTEN = frozenset({"progress", "round", "early_start"})
_KNOWN = ("event", "peer", "time_s", "at")

log = logging.getLogger("murmuration")


def in_arguments(text: str) -> str:
    """Spells the options in a message for the command line as arguments of Python."""
    parts = _COMMAND.split(text.replace("by `murmur up`", "without join="))
    return "".join(p if p.startswith("`") else _OPTION.sub(_as_argument, p) for p in parts)


def _as_argument(option: re.Match[str]) -> str:
    name = _OTHER_NAMES.get(option[1], option[1].replace("-", "_"))
    if name in _SWITCHES:
        return f"{name}=True{f' {option[2]}' if option[2] else ''}"
    if option[2] is None:
        return f"{name}="
    return f"{name}={option[2] if option[2].replace('.', '').isdigit() else repr(option[2])}"


def for_python(error: MurmurError) -> MurmurError:
    """Has it name arguments of Python. Of its traceback the user's own frames stay."""
    error.args = (in_arguments(str(error)),)
    return error.with_traceback(None)


P = ParamSpec("P")
T = TypeVar("T")


def errors_in_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates what a user calls: what it raises is as `for_python` makes it."""

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        try:
            return function(*given, **named)
        except MurmurError as error:
            raise for_python(error) from None

    return call


class LoopLines:
    """Tells joins, deaths, waits and the first round at INFO, what goes wrong at WARNING, each
    round at DEBUG. Where `logging` is not configured, INFO and above go to stderr. any thread."""

    def __init__(self, *, progress: bool = False) -> None:
        self._lines = PlainLines(joins=None, spell=in_arguments) if progress else None
        self._had_a_round = False

    def __call__(self, event: Mapping[str, object]) -> None:
        if self._lines is not None:
            self._lines(event)
        kind, line = str(event["event"]), describe(event, joins=None)
        if kind == "round" and not self._had_a_round:
            self._had_a_round = True
            self._tell(logging.INFO, f"the first {line}")
        elif line is None or kind in _OFTEN:
            values = {key: value for key, value in event.items() if key not in _KNOWN}
            self._tell(logging.DEBUG, " ".join([kind, *(f"{k}={v}" for k, v in values.items())]))
        else:
            self._tell(logging.WARNING if kind in _WARNINGS else logging.INFO, line)

    def _tell(self, level: int, line: str) -> None:
        said = in_arguments(line)
        least = max(log.level or logging.INFO, logging.root.manager.disable + 1)
        if log.hasHandlers():
            log.disabled = False  # as `dictConfig` leaves all loggers that it does not name
            log.log(level, "%s", said)
        elif self._lines is None and level >= least:
            print_line(f"murmuration: {said}", to="stderr")


_SETTINGS = {each.name: key for each in fields(RunFlags) if (key := each.metadata["key"])}
_OF_TASKS = {
    "task": "a loop of your own brings model and samples",
    "inner": "the optimizer of your loop is your own",
    "stages": "a loop of your own trains whole models",
    "checkpoint": "a loop of your own saves `swarm.state_dict()`",
}
_OF_RUNS = {
    "evaluate_every": "evaluates by itself, the anchor within `with swarm.anchor()`",
    "track": "has trackers of its own, and `swarm.metrics` for them",
}
_NUMBERS = {"integer": int, "float": float}


def checked(function: Callable[P, None]) -> Callable[P, None]:
    """Decorates a method that takes `Swarm`'s keywords, to get them plain. Raises UsageError."""

    @errors_in_arguments
    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> None:
        for name, value in named.items():
            if isinstance(value, str | Path) and not is_utf8(str(value)):
                raise _refused(name, value, "it is not UTF-8, which peers tell names in; rename it")
            if name in _CHECKS and (value is not None or name in _NEVER_NONE):
                named[name] = _CHECKS[name](name, value)
        function(*given, **named)

    return call


def check_names(named: Iterable[str]) -> None:
    """Raises UsageError: these are not what `Swarm` takes."""
    from murmuration.worker.library.swarm import Swarm

    (_, *takes) = inspect.signature(Swarm.__init__).parameters
    for name in named:
        if name not in takes:
            near = nearest(_OTHER_NAMES.get(name, name), takes)
            raise UsageError(f"Swarm has no argument {name}{near}")


def plain(value: Any) -> Any:
    """A number of numpy or torch, a list of those or a path as Python has it; others stay."""
    match value:
        case np.generic() | np.ndarray() | torch.Tensor():
            return value.tolist()
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case _:
            return value


def settings_by_argument(
    named: Mapping[str, object], more: Mapping[str, object] | None
) -> dict[str, str]:
    """`section.key=value` as the TOML has it, by the argument that says so. Raises UsageError: two
    say one thing differently, or exclude each other. Args: more: `settings`."""
    more = more or {}
    given = {argument: value for argument, value in named.items() if value is not None}
    for argument, value in given.items():
        if (other := more.get(_SETTINGS[argument])) is not None and other != value:
            raise UsageError(
                f"{argument}={value!r} and settings[{_SETTINGS[argument]!r}] = {other!r} say one "
                "thing twice: leave one of them out"
            )
    preset = given.get("preset") or more.get("diloco.preset")
    period = given.get("inner_steps") or more.get("diloco.inner_steps")
    if preset == "ddp" and period not in (None, 1):
        raise UsageError(
            f"inner_steps={period!r} and preset='ddp', which averages gradients at each step: "
            "leave one of them out"
        )
    found = {f"{_SETTINGS[a]}={json.dumps(v)}": f"{a}={v!r}" for a, v in given.items()}
    return found | {f"{k}={json.dumps(v)}": f"settings[{k!r}]" for k, v in more.items()}


def _refused(name: str, value: object, wanted: str) -> UsageError:
    shown = repr(value)
    return UsageError(f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'}: {wanted}")


def _holding(holds: Callable[[Any], bool], wanted: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: object) -> Any:
        if not holds(value := plain(value)):
            raise _refused(name, value, wanted)
        return value

    return check


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and not math.isnan(value)  # type: ignore[arg-type]


_count = _holding(lambda v: type(v) is int and v >= 1, "it must be of type int, at least 1")
_switch = _holding(lambda v: isinstance(v, bool), "it must be True or False")
_text = _holding(
    lambda v: isinstance(v, str) and v != "", "it must be a text that is not empty, or left out"
)
_served = _holding(lambda v: type(v) in (str, int), "write a port, or 'HOST:PORT'")


def _address(name: str, value: object) -> str:
    try:
        if not isinstance(value, str):
            raise ValueError("write HOST:PORT as a text, such as '127.0.0.1:7700'")
        for each in value.split(",") if name == "advertise" else (value,):
            split_address(each)
    except ValueError as error:
        raise _refused(name, value, str(error)) from None
    return value


def _addresses(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (_address(name, value),)
    return tuple(_address(name, each) for each in value)


def _folder(name: str, value: object) -> str:
    value = plain(value)
    if not isinstance(value, str) or not value:
        raise _refused(name, value, "it must be the path of a folder, or None")
    path = Path(value)
    taken = next((each for each in (path, *path.parents) if each.exists()), None)
    if taken is not None and not taken.is_dir():
        raise _refused(name, value, f"{taken} is a file: name a folder")
    return value


def _settings(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise _refused(name, value, 'write a dict, such as {"diloco.codec": "e3m0"}')
    found = {}
    for key, given in value.items():
        section, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        if not section or not dot or not rest:
            raise UsageError(f"{name}[{key!r}]: write section.key, such as 'diloco.inner_steps'")
        if section in _OF_TASKS:
            raise UsageError(f"{name}[{key!r}] is for tasks: {_OF_TASKS[section]}; leave it out")
        found[key] = given = plain(given)
        elements = given if isinstance(given, list) else [given]
        if not all(isinstance(each, str | bool | int | float) for each in elements):
            kind = "None" if given is None else type(given).__name__
            raise UsageError(f"{name}[{key!r}] is {kind}: write text, a number, or a list of these")
    return found


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("preset", "name", "token"), _text),
    **dict.fromkeys(("inner_steps", "steps", "min_peers"), _count),
    **dict.fromkeys(("insecure", "no_relay", "progress"), _switch),
    **dict.fromkeys(("serve_metrics", "web"), _served),
    "join": _addresses,
    "listen": _address,
    "advertise": lambda name, value: value if value == ROUTER else _address(name, value),
    "settings": _settings,
    "out": _folder,
    "wait_s": _holding(
        lambda v: _is_number(v) and v > 0, "it must be a number of seconds, above 0"
    ),
    "relay_mbps": _holding(
        lambda v: _is_number(v) and 0 <= v < math.inf,
        "it must be a rate of at least 0, which relays for nobody",
    ),
}
_NEVER_NONE = frozenset({"listen", "insecure", "no_relay", "relay_mbps", "progress"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a script the options of `Swarm` that differ between machines, `--join` to `--progress`.

    Swarm(model, optimizer, **vars(parser.parse_args())) takes them as they are."""
    from murmuration.worker.cli.commands import up  # its options, told once
    from murmuration.worker.library.swarm import Swarm

    told = {each.opts[0]: each for each in up.params if isinstance(each, click.Option)}
    told["--serve-metrics"] = told["--metrics"]
    group = parser.add_argument_group("swarm")
    for name, argument in inspect.signature(Swarm.__init__).parameters.items():
        option = told.get(flag := f"--{name.replace('_', '-')}")
        if option is None or name in _SETTINGS:
            continue  # a machine's own are meant
        kind = option.type.name.removesuffix(" range")
        more: dict[str, Any] = {"metavar": option.metavar}
        if option.is_flag:
            more = {"action": "store_true"}
        elif option.multiple:
            more |= {"nargs": "+", "action": "extend"}
        elif kind in _NUMBERS:
            more["type"] = _NUMBERS[kind]
        more["default"] = argument.default
        group.add_argument(flag, help=(option.help or "").partition("  [default")[0], **more)
    group.add_argument("--progress", action="store_true", help="Print lines as `murmur up` does.")


# The run's config, who gave it, and how others reach this peer.
Terms = tuple[Config, FirstAnswer | None, Addresses]


def agree_on_terms(
    given: Mapping[str, str],
    addresses: Addresses,
    schema: Sequence[TensorSpec],
    newcomer: Newcomer,
    identity: Identity | None,
    *,
    site: bool,
) -> Terms:
    """Raises as `Swarm`."""
    first = newcomer.ask_run(identity) if newcomer.contacts else None
    if first is None:
        task, ends = f'task.name="{OWN_LOOP}"', [f"run.steps={NO_END}"]
        steps = [each for each in given if each.startswith("run.steps=")]
        config = load_config(None, [task, *([] if steps else ends), *given], None, given)
        if config.inner.optimizer == KSEED:
            raise ConfigError(
                "preset='kseed' is for tasks: the optimizer of your loop is your own; take another"
            )
    else:
        config = _joined(given, first)
        own = Manifest.of(config, schema)
        different = first_difference(own.agreed, first.manifest.agreed)
        if different := different or own.other_order(first.manifest):
            raise ManifestRefused(
                f"{first.address} trains another model: {different}; build the same one, with the "
                "same parts frozen, or join another run",
                dict(own.document),
            )
    for key, does in _OF_RUNS.items():
        if getattr(config.run, key):
            why = f"run.{key} is for tasks: a loop of your own {does}; leave it out"
            raise ConfigError(f"settings: {why}")
    found = addresses.found([first.address], first.seen_from) if first else addresses.found([])
    if site and config.plan.payload == "gradient":
        raise UsageError(
            "preset ddp averages gradients at every step, which a site of several processes or "
            "shards does by itself; use diloco or streaming between sites"
        )
    return config, first, found


def _joined(given: Mapping[str, str], first: FirstAnswer) -> Config:
    check_version(first)
    manifest, where = first.manifest, first.address
    task = manifest.sections.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    if name != OWN_LOOP:
        raise ManifestRefused(
            f"{where} trains the task {name!r}, not a loop of its own: join it with "
            f"`murmur join {where}`",
            {"task": {"name": OWN_LOOP}},
        )
    frozen = [each for each in given if each.startswith("task.frozen=")]
    options = manifest.sections["task"]
    if frozen != [f"task.frozen={json.dumps(options[key])}" for key in options if key == "frozen"]:
        raise ManifestRefused(
            f"{where} has other frozen parameters than this model: load the same checkpoint, and "
            "freeze the same part of it",
            {"task": {**options, "frozen": "other parameters"}},
        )
    return join_config(manifest.sections, None, list(given), where)
