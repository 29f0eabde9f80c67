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
from murmuration.worker.tasks.task import Task, nearest, one_line

OWN_LOOP = "own-loop"  # the name in the manifest of a run whose peers bring loops of their own
BUILT_IN: Mapping[str, Callable[..., Task]] = {
    "llama-bytes": LlamaBytes,
    "huggingface": HuggingFace,
}


def load_task(name: str, *, seed: int, options: Mapping[str, object] | None = None) -> Task:
    """Builds the task that a run names.

    A module is looked for on Python's path and then in the working directory. Loading one runs its
    code, so a name must come from the user of this machine, never from a peer alone. Args: name: a
    built-in task, or "package.module:factory"; options: keywords for the factory, as the run's TOML
    gives them. Raises TaskError: the name, an option or the factory's result is not usable;
    TextError: the task's text is missing, unreadable or too short."""
    given, factory = dict(options or {}), BUILT_IN.get(name) or import_factory(name)
    _check_options(name, factory, given)
    try:
        task = factory(**given, seed=seed)
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(f"task {name!r}: {one_line(error)}") from error
    methods = ("model", "batches", "loss")
    if missing := [each for each in methods if not callable(getattr(task, each, None))]:
        raise TaskError(
            f"task {name!r}: the factory returned {type(task).__name__!r}, which lacks "
            f"{', '.join(missing)}: a task has model(), batches(split, cursor) and "
            "loss(model, batch)"
        )
    return task


def local_settings(name: str, options: Mapping[str, object]) -> tuple[str, ...]:
    """Names the keys of a [task] that have this machine load code or read a file: of a task that is
    not built in its name. A built-in task says which of its options are such; the others may come
    from anybody."""
    if name == OWN_LOOP:
        return ()  # nothing is loaded
    if (factory := BUILT_IN.get(name)) is None:
        return ("name",)
    # Factories are declared as callables; those that are built in are classes that have it.
    found: tuple[str, ...] = factory.local_options(options)  # type: ignore[attr-defined]
    return found


def least_bytes(name: str, options: Mapping[str, object], stages: int) -> int:
    """The least memory that training such a model takes, by its sizes; 0 where a task does not say.
    Args: stages: of which the largest counts. Raises TaskError: sizes that cannot be."""
    count = getattr(BUILT_IN.get(name), "least_bytes", None)
    try:
        return int(count(options, stages)) if count is not None else 0
    except (TypeError, ValueError, ArithmeticError):  # of the wrong type: the task will say so
        return 0


def import_factory(name: str, what: str = "task") -> Callable[..., Any]:
    """Finds what `package.module:factory` names. Raises TaskError: as `load_task`."""
    module_name, colon, factory_name = name.partition(":")
    if name == OWN_LOOP:
        raise TaskError(
            "this run's peers bring training loops of their own: join it from one, with "
            "murmuration.Swarm(model, optimizer, join=...)"
        )
    if not colon:
        raise TaskError(
            f"unknown task {name!r}{nearest(name, sorted(BUILT_IN))} "
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
            f"{type(error).__name__}: {one_line(error)}"
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
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = {each.name: each for each in parameters if each.kind in named}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        if "seed" not in keywords:
            raise TaskError(f"task {name!r}: its factory must accept a keyword 'seed'")
        if unknown := sorted(set(options) - set(keywords)):
            near = nearest(unknown[0], sorted({"name", *keywords} - {"seed"}))
            raise TaskError(f"task {name!r} has no option {unknown[0]!r}{near}")
    for key, each in keywords.items():
        if each.default is each.empty and key not in {"seed", *options}:
            raise TaskError(f"task {name!r} needs the option {key!r}: set it in the run's TOML")
