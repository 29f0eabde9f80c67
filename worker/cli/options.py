"""What commands have in common: options in frozen dataclasses, links, files to write."""

import math
from collections.abc import Callable
from dataclasses import field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from murmuration.worker.errors import UsageError

if TYPE_CHECKING:
    from murmuration.algorithms.link import Link

_Command = Callable[..., Any]


def option(*names: str, **attributes: Any) -> Any:
    """A field of a dataclass that is an option. Args: as `click.option` takes them."""
    return field(metadata={"names": names, "attributes": attributes})


def options(argument: str, group: type) -> Callable[[_Command], _Command]:
    """Gives a command the options of a dataclass, which it takes as one argument of that name."""

    def decorate(command: _Command) -> _Command:
        @wraps(command)
        def grouped(**values: Any) -> Any:
            own = group(**{each.name: values.pop(each.name) for each in fields(group)})
            return command(**values, **{argument: own})

        decorated: _Command = grouped
        for each in reversed(fields(group)):
            names, attributes = each.metadata["names"], each.metadata["attributes"]
            decorated = click.option(*names, each.name, **attributes)(decorated)
        return decorated

    return decorate


def flag_of(group: type, name: str) -> str:
    """How the option in that field is typed: `--step-time`."""
    (found,) = (each for each in fields(group) if each.name == name)
    return str(found.metadata["names"][0].partition("/")[0])


def check_finite(given: Any, *names: str) -> None:
    """Raises UsageError for an option that is not a number; one that is left out passes."""
    for name in names:
        value = getattr(given, name)
        if value is not None and not math.isfinite(value):
            flag = flag_of(type(given), name)
            raise UsageError(f"{flag} is {value}; it must be a finite number")


def link_of(text: str) -> "Link":
    """What `--link` gives. Raises UsageError."""
    from murmuration.algorithms.link import parse_link

    try:
        return parse_link(text)
    except ValueError as error:
        raise UsageError(f"--link: {error}") from error


def write_file(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Raises UsageError: the file that an option names cannot be written."""
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from error
