"""What a loop of one's own is told: errors and lines in the words of Python, through `logging`.

What the worker's parts say is meant for the command line: it names `--min-peers`. A caller of the
library has written `min_peers=`.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from murmuration.worker.errors import MurmurError
from murmuration.worker.views.lines import PlainLines, describe

_SWITCHES = ("insecure", "no_relay")
_OTHER_NAMES = {"metrics": "serve_metrics", "set": "settings"}
_COMMAND = re.compile(r"(`[^`]*`)")
_VALUE = r"(?:[ =](\d+(?:\.\d+)?|[A-Z]+:[A-Z]+|[^\s;,()]*[:/][^\s;,():]+?)(?=[:;,.)]*(?:\s|$)))?"
_OPTION = re.compile(rf"--([a-z]+(?:-[a-z]+)*)\b{_VALUE}")
_WARNINGS = frozenset({"warning", "put_back", "round_failed"})
_OFTEN = frozenset({"progress", "round", "head_start"})
_KNOWN = ("event", "peer", "time_s", "at")

log = logging.getLogger("murmuration")


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


class LoopLines:
    """Tells of each event: joins, deaths, waits and the first round at INFO, what goes wrong at
    WARNING, and each round at DEBUG. any thread.

    Where the program has not configured `logging`, lines of INFO and above go to stderr.

    Args:
        progress: print the lines of `murmur up` on stdout, with those of the training.
    """

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
        if log.hasHandlers():
            log.log(level, "%s", said)
        elif self._lines is None and level >= max(
            log.level or logging.INFO, logging.root.manager.disable + 1
        ):
            print(f"murmuration: {said}", file=sys.stderr, flush=True)
