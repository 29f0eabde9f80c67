"""From a task's name and options to the task object.

A name is a built-in one ("llama-bytes") or "package.module:factory". Either way a factory is
called with the options as keywords and with `seed`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks.huggingface import HuggingFace
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Task, nearest

OWN_LOOP = "own-loop"  # the name in the manifest of a run whose peers bring loops of their own
BUILT_IN: Mapping[str, Callable[..., Task]] = {
    "llama-bytes": LlamaBytes,
    "huggingface": HuggingFace,
}


def load_task(name: str, *, seed: int, options: Mapping[str, object] | None = None) -> Task:
    """Build the task that a run names.

    A module is looked for on Python's path and then in the working directory. Loading one runs
    its code, so a name must come from the user of this machine, never from a peer alone.

    Args:
        name: a built-in task, or "package.module:factory".
        options: keywords for the factory, as the run's TOML gives them.

    Raises:
        TaskError: the name, an option or the factory's result is not usable.
        TextError: the task's text is missing, unreadable or too short.
    """
    given = dict(options or {})
    factory = task_factory(name, given)
    try:
        task = factory(**given, seed=seed)
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(f"task {name!r}: {_one_line(error)}") from error
    missing = [
        method
        for method in ("model", "batches", "loss")
        if not callable(getattr(task, method, None))
    ]
    if missing:
        raise TaskError(
            f"task {name!r}: the factory returned {type(task).__name__!r}, which lacks "
            f"{', '.join(missing)}: a task has model(), batches(split, cursor) and "
            "loss(model, batch)"
        )
    return task


def local_settings(name: str, options: Mapping[str, object]) -> tuple[str, ...]:
    """The keys of a [task] that have this machine load code or read a file.

    Of a task that is not built in that is its name. A built-in task says which of its options are
    such; the others may come from anybody.
    """
    if name == OWN_LOOP:
        return ()  # nothing is loaded
    factory = BUILT_IN.get(name)
    if factory is None:
        return ("name",)
    # Factories are declared as callables; those that are built in are classes that have it.
    found: tuple[str, ...] = factory.local_options(options)  # type: ignore[attr-defined]
    return found


def least_bytes(name: str, options: Mapping[str, object], stages: int) -> int:
    """The least memory that training such a model takes, counted from its sizes: nothing is built.
    0 where a task does not say, or is not built in. Raises TaskError: sizes that cannot be.

    Args:
        stages: that the model is cut into; the largest counts.
    """
    count = getattr(BUILT_IN.get(name), "least_bytes", None)
    try:
        return int(count(options, stages)) if count is not None else 0
    except (TypeError, ValueError, ArithmeticError):  # of the wrong type: the task will say so
        return 0


def task_factory(name: str, options: Mapping[str, object]) -> Callable[..., Task]:
    """Return what `load_task` calls with these options, which it accepts by their names.

    Raises:
        TaskError: the name or an option is not usable.
    """
    factory = BUILT_IN.get(name) or import_factory(name)
    _check_options(name, factory, options)
    return factory


def import_factory(name: str, what: str = "task") -> Callable[..., Any]:
    """What `package.module:factory` names. Raises TaskError: as `load_task`."""
    module_name, colon, factory_name = name.partition(":")
    if name == OWN_LOOP:
        raise TaskError(
            "this run's peers bring training loops of their own: join it from one, with "
            "murmuration.Swarm(model, optimizer, join=...)"
        )
    if not colon:
        raise TaskError(
            f"unknown task {name!r}{nearest(name, BUILT_IN)} "
            "(a task of your own is 'package.module:factory')"
        )
    if not module_name or not factory_name.isidentifier():
        raise TaskError(
            f"{what} {name!r}: write it as 'package.module:factory', for example 'mytask:build'"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TaskError(
            f"{what} {name!r}: no module named {error.name!r}: install it, or start in the folder "
            "that holds it, or put that folder on PYTHONPATH"
        ) from error
    except Exception as error:  # whatever a user's module may raise while it is imported
        raise TaskError(
            f"{what} {name!r}: importing {module_name!r} failed with "
            f"{type(error).__name__}: {_one_line(error)}"
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        problem = "has no" if factory is None else "holds something that cannot be called as"
        raise TaskError(
            f"{what} {name!r}: module {module_name!r} {problem} {factory_name!r}"
            f"{nearest(factory_name, public)}"
        )
    found: Callable[..., Any] = factory
    return found


def _check_options(name: str, factory: Callable[..., Task], options: Mapping[str, object]) -> None:
    if "seed" in options:
        raise TaskError(
            f"task {name!r}: 'seed' is the run's own setting: remove it from the task's options"
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a factory written in C: let the call itself judge
        return
    keywords = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        if "seed" not in keywords:
            raise TaskError(f"task {name!r}: its factory must accept a keyword 'seed'")
        unknown = sorted(set(options) - set(keywords))
        if unknown:
            known = set(keywords) - {"seed"}
            raise TaskError(
                f"task {name!r} has no option {unknown[0]!r}{nearest(unknown[0], known)}"
            )
    needed = [
        key
        for key, parameter in keywords.items()
        if parameter.default is parameter.empty and key not in options and key != "seed"
    ]
    if needed:
        raise TaskError(f"task {name!r} needs the option {needed[0]!r}: set it in the run's TOML")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
