"""The arguments of `Swarm`: checked one by one, and named in errors as the caller wrote them.

What the worker's parts say is meant for the command line: it names `--min-peers`. A caller of the
library has written `min_peers=`.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from murmuration.protos.addresses import split_address
from murmuration.protos.text import is_utf8
from murmuration.worker.errors import MurmurError, UsageError
from murmuration.worker.training.model import saved_buffers

P = ParamSpec("P")

_SWITCHES = ("insecure", "no_relay")
_OTHER_NAMES = {"metrics": "serve_metrics", "set": "settings"}
_COMMAND = re.compile(r"(`[^`]*`)")
_VALUE = r"(?:[ =](\d+(?:\.\d+)?|[A-Z]+:[A-Z]+|[^\s;,()]*[:/][^\s;,():]+?)(?=[:;,.)]*(?:\s|$)))?"
_OPTION = re.compile(rf"--([a-z]+(?:-[a-z]+)*)\b{_VALUE}")
_TWICE = {
    "preset": "diloco.preset",
    "inner_steps": "diloco.inner_steps",
    "steps": "run.steps",
}
_OF_TASKS = {
    "task": "a loop of your own brings model and samples",
    "inner": "the optimizer of your loop is your own",
    "stages": "a loop of your own trains whole models",
    "checkpoint": "a loop of your own saves `swarm.state_dict()`",
}


# ------------------------------------------------------------------------------- names in errors


def in_arguments(text: str) -> str:
    """A message for the command line, with its options as arguments of Python.

    >>> in_arguments("1 of 2 peers; lower --min-peers, or say --listen 0.0.0.0:7700")
    "1 of 2 peers; lower min_peers=, or say listen='0.0.0.0:7700'"
    """
    parts = _COMMAND.split(text)
    return "".join(p if p.startswith("`") else _OPTION.sub(_as_argument, p) for p in parts)


def _as_argument(option: re.Match[str]) -> str:
    name = _OTHER_NAMES.get(option[1], option[1].replace("-", "_"))
    if name in _SWITCHES:
        return f"{name}=True{f' {option[2]}' if option[2] else ''}"
    if option[2] is None:
        return f"{name}="
    return f"{name}={option[2] if option[2].replace('.', '').isdigit() else repr(option[2])}"


@contextmanager
def errors_in_arguments() -> Iterator[None]:
    """Errors that leave the block, or a function that this decorates, name arguments of Python."""
    try:
        yield
    except MurmurError as error:
        error.args = (in_arguments(str(error)),)
        raise


# ------------------------------------------------------------------------------------- arguments


def checked(function: Callable[P, None]) -> Callable[P, None]:
    """Decorates a method that takes `Swarm`'s keywords: it gets them as plain values of Python.

    Raises:
        UsageError: names the first that cannot be used.
    """

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> None:
        for name, value in named.items():
            if isinstance(value, str | Path) and not is_utf8(str(value)):
                raise _refused(name, value, "it is not UTF-8, which peers tell names in; rename it")
            if name in _CHECKS:
                named[name] = _CHECKS[name](name, value)
        with errors_in_arguments():
            function(*given, **named)

    return call


def plain(value: Any) -> Any:
    """A number of numpy or torch, a list of those or a path as Python has it; others as they are.

    >>> plain(np.int64(3)), plain({"a": (np.float32(0.5), torch.tensor(2))}), plain(Path("x"))
    (3, {'a': [0.5, 2]}, 'x')
    """
    match value:
        case np.generic() | np.ndarray() | Tensor():
            return value.tolist()
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {key: plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case _:
            return value


def check_once(named: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Raises UsageError: an argument and a setting that say one thing, and not the same; or
    arguments that exclude each other."""
    for argument, key in _TWICE.items():
        one, other = named.get(argument), settings.get(key)
        if one is not None and other is not None and one != other:
            raise UsageError(
                f"{argument}={one!r} and settings[{key!r}] = {other!r} say one thing twice: leave "
                "one of them out"
            )
    preset = named.get("preset") or settings.get("diloco.preset")
    period = named.get("inner_steps") or settings.get("diloco.inner_steps")
    if preset == "ddp" and period not in (None, 1):
        raise UsageError(
            f"inner_steps={period!r} and preset='ddp', which averages gradients at each step: "
            "leave one of them out"
        )


def _refused(name: str, value: object, wanted: str) -> UsageError:
    shown = repr(value)
    return UsageError(f"{name}={shown if len(shown) <= 60 else shown[:60] + '...'}: {wanted}")


def _count(name: str, value: object) -> int | None:
    value = plain(value)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise _refused(name, value, "it must be of type int, at least 1")
    return value


def _number(name: str, value: object) -> float | None:
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _refused(name, value, "it must be a number")
    return float(value)


def _seconds(name: str, value: object) -> float | None:
    seconds = _number(name, value)
    if seconds is not None and seconds <= 0:
        raise _refused(name, value, "it must be seconds, above 0")
    return seconds


def _rate(name: str, value: object) -> float:
    rate = _number(name, value)
    if rate is None or not 0 <= rate < math.inf:
        raise _refused(name, value, "it must be a rate of at least 0, which relays for nobody")
    return rate


def _switch(name: str, value: object) -> bool:
    value = plain(value)
    if not isinstance(value, bool):
        raise _refused(name, value, "it must be True or False")
    return value


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _refused(name, value, "it must be a text that is not empty, or left out")
    return value


def _address(name: str, value: object) -> str:
    try:
        if not isinstance(value, str):
            raise ValueError("write HOST:PORT as a text, such as '127.0.0.1:7700'")
        split_address(value)
    except ValueError as error:
        raise _refused(name, value, str(error)) from None
    return value


def _own_address(name: str, value: object) -> str | None:
    return None if value is None else _address(name, value)


def _addresses(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()  # it starts a run
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (_address(name, value),)
    return tuple(_address(name, each) for each in value)


def _served(name: str, value: object) -> str | int | None:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise _refused(name, value, "write a port, or 'HOST:PORT'")
    return value


def _folder(name: str, value: object) -> str | None:
    value = plain(value)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _refused(name, value, "it must be the path of a folder, or None")
    path = Path(value)
    taken = next((each for each in (path, *path.parents) if each.exists()), None)
    if taken is not None and not taken.is_dir():
        raise _refused(name, value, f"{taken} is a file: name a folder")
    return value


def _settings(name: str, value: object) -> dict[str, object] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refused(name, value, 'write a dict, such as {"diloco.codec": "e3m0"}')
    return {_key(name, key): _setting(name, key, plain(each)) for key, each in value.items()}


def _key(name: str, key: object) -> str:
    section, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
    if not section or not dot or not rest:
        raise UsageError(f"{name}[{key!r}]: write section.key, such as 'diloco.inner_steps'")
    if section in _OF_TASKS:
        raise UsageError(f"{name}[{key!r}] is for tasks: {_OF_TASKS[section]}; leave it out")
    return f"{section}.{rest}"


def _setting(name: str, key: str, value: object) -> object:
    elements = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | bool | int | float) for each in elements):
        shown = value.__class__.__name__ if value is not None else "None"
        raise UsageError(f"{name}[{key!r}] is {shown}: write text, a number, or a list of these")
    return value


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "join": _addresses,
    "preset": _text,
    "inner_steps": _count,
    "steps": _count,
    "listen": _address,
    "advertise": _own_address,
    "name": _text,
    "min_peers": _count,
    "wait_s": _seconds,
    "settings": _settings,
    "out": _folder,
    "token": _text,
    "insecure": _switch,
    "serve_metrics": _served,
    "web": _served,
    "no_relay": _switch,
    "relay_mbps": _rate,
    "progress": _switch,
}


# --------------------------------------------------------------------------- model and optimizer


def optimizers_of(model: object, given: object) -> list[Optimizer]:
    """One or several, as a list. Raises UsageError: one is none, or the model is none."""
    if isinstance(model, Optimizer):
        raise UsageError("the model comes first: Swarm(model, optimizer)")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is {_kind(model)}; give a torch.nn.Module (several as a torch.nn.ModuleList)"
        )
    if isinstance(given, Optimizer):
        return [given]
    if isinstance(given, str | Mapping | LRScheduler | type) or not isinstance(given, Iterable):
        raise _no_optimizer(given)
    found = list(given)
    for each in found:
        if not isinstance(each, Optimizer):
            raise _no_optimizer(each)
    if len({id(each) for each in found}) < len(found):
        raise UsageError("optimizer: one is given twice; give each once, in the order of the steps")
    return found


def _no_optimizer(given: object) -> UsageError:
    says = "make one, such as torch.optim.AdamW(model.parameters())"
    if isinstance(given, LRScheduler):
        says = "give its .optimizer; the scheduler stays in your loop"
    elif isinstance(given, Mapping):
        says = "give its optimizers as a list"
    elif hasattr(given, "unscale_"):
        says = "give the optimizer; the scaler stays in your loop"
    return UsageError(f"optimizer is {_kind(given)}, no torch.optim.Optimizer; {says}")


def _kind(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str | None) else f"of type {type(given).__name__}"


def check_tensors(model: nn.Module) -> None:
    """Raises UsageError: one of what would travel has no values, or not in the plain layout."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name!r} is of a lazy module and has no shape yet: run a batch through the model "
                "first, and make the optimizer after it"
            )
    for name, tensor in (*saved_buffers(model).items(), *model.named_parameters()):
        if (problem := _unfit(tensor)) is not None:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UsageError(f"{kind} {name!r} {problem}")


def _unfit(tensor: Tensor) -> str | None:
    instead = "keep it at home, as a buffer with persistent=False"
    if tensor.is_meta:
        return "is on the device meta, without values: load the model before `with Swarm(...)`"
    if tensor.is_quantized:
        return f"is quantized: quantize the model after training, or {instead}"
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"has the layout {layout}: make it dense, or {instead}"
    if tensor.is_inference():
        return "was made in torch.inference_mode, which nothing can write to: make it outside"
    return None
