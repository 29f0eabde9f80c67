"""What a loop of one's own is told of the swarm: lines through `logging`, or on stdout."""

import logging
import sys
from collections.abc import Mapping

from murmuration.worker.library.arguments import in_arguments
from murmuration.worker.views.lines import PlainLines, describe

_WARNINGS = frozenset({"warning", "put_back", "round_failed"})
_OFTEN = frozenset({"progress", "round", "head_start"})
_KNOWN = ("event", "peer", "time_s", "at")

log = logging.getLogger("murmuration")


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
