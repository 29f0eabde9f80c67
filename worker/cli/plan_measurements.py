"""The file of measurements of `murmur plan --stages`, as a staged worker writes it.

Null is what was not measured, and
the median of the rest stands for it:

    peers             names, in the order of everything else
    stage             that each peer serves; left out where peers are not placed yet
    latency_s         one way, a row for each sender
    rate_bytes_per_s  likewise
    forward_s         of a visit, for each peer; so are backward_s and loss_s
    memory            microbatches that each peer may hold
    activation_bytes, microbatches (of each origin in an iteration), skip, spread
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmuration.algorithms.link import Link
from murmuration.algorithms.skippipe.assignment import Groups
from murmuration.algorithms.skippipe.pipeline import BACKWARD_RATIO, LOSS_RATIO, Floats, Links
from murmuration.worker.errors import UsageError

RECOMPUTED_RATIO = 1 + BACKWARD_RATIO  # a backward computes its stage's forward again


class VisitTimes(NamedTuple):
    """What visits take, of each peer, of each stage or of any: shape (P,), (S,) or ()."""

    forward_s: Floats
    backward_s: Floats
    loss_s: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurements:
    """What is known of P peers; None where the command line has to say it.

    Args:
        names, links: of the peers.
        given: the link of each peer, where that is what is known.
        stages: the peers of each stage, where they are placed already.
        visits: of each peer on the stage that it serves.
        memory, activation_bytes, microbatches, skip, spread: see above.
        filled: what was not measured and is replaced, in words.
    """

    names: tuple[str, ...]
    links: Links
    given: tuple[Link, ...] = ()
    stages: Groups | None = None
    visits: VisitTimes | None = None
    memory: tuple[int, ...] | None = None
    activation_bytes: int | None = None
    microbatches: int | None = None
    skip: float | None = None
    spread: int | None = None
    filled: tuple[str, ...] = ()


def read_links(path: Path) -> Measurements:
    """Raises UsageError: what is wrong in which entry, and how to mend it."""
    try:
        return _Document(_loaded(path.read_bytes())).known()
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise UsageError(f"--links {path}: {reason}") from error
    except ValueError as error:
        raise UsageError(f"--links {path}: {error}") from error


def _loaded(text: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:  # of the text's encoding, too
        raise ValueError(f"not JSON: {error}; take the file that a staged worker writes") from error
    if not isinstance(document, dict):
        raise ValueError('not an object; it begins like {"peers": ["w0", "w1"], ...}')
    return document


class _Document:
    """The entries, checked one after another. All raise ValueError."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._gaps: list[str] = []
        names = entries.get("peers")
        if not isinstance(names, list) or not names:
            raise ValueError('peers is missing or empty; write names like ["w0", "w1"]')
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError("peers must all be names, texts that are not empty")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"peers names {repeated[0]!r} twice; each peer has one row")
        self._names: tuple[str, ...] = tuple(names)

    def known(self) -> Measurements:
        links = Links(
            latency_s=self._matrix("latency_s", "latencies", zero=True),
            rate_bytes_per_s=self._matrix("rate_bytes_per_s", "rates", zero=False),
        )
        stages = self._stages()
        return Measurements(
            names=self._names,
            links=links,
            stages=stages,
            visits=self._visits(range(len(self._names)) if stages is None else stages[0]),
            memory=self._memory(),
            activation_bytes=self._integer("activation_bytes"),
            microbatches=self._integer("microbatches"),
            skip=self._skip(),
            spread=self._integer("spread", least=0),
            filled=tuple(self._gaps),
        )

    def _matrix(self, name: str, what: str, *, zero: bool) -> Floats:
        """(P, P); the diagonal is not read."""
        rows, peers = self._list(name), len(self._names)
        if rows is None:
            raise ValueError(f"{name} is missing; it has a row for each of {peers} peers")
        values = np.full((peers, peers), math.nan)
        for i, (sender, row) in enumerate(zip(self._names, rows, strict=True)):
            if not isinstance(row, list) or len(row) != peers:
                raise ValueError(
                    f"{name}, row of {sender}: it must be a list of {peers} numbers, one for each "
                    "peer (null where nothing is measured)"
                )
            for j, value in enumerate(row):
                if i != j:
                    where = f"{name} from {sender} to {self._names[j]}"
                    values[i, j] = _number(value, where, zero=zero)
        others = ~np.eye(peers, dtype=bool)
        if peers > 1 and np.isnan(values[others]).all():
            raise ValueError(
                f"{name}: nothing is measured between any two peers; let the swarm run for an "
                "iteration, or give a --link for each peer instead"
            )
        np.fill_diagonal(values, 1.0)
        values[others] = self._filled(values[others], what)
        return values

    def _visits(self, origins: Sequence[int]) -> VisitTimes | None:
        """None if no peer has measured a forward."""
        everyone = range(len(self._names))
        forward_s = self._times("forward_s", "forward times", everyone)
        if forward_s is None:
            return None
        backward_s = self._times("backward_s", "backward times", everyone)
        # Only stage 0 computes losses: that the others measured none is no gap.
        loss_s = self._times("loss_s", "loss times", origins)
        return VisitTimes(
            forward_s,
            RECOMPUTED_RATIO * forward_s if backward_s is None else backward_s,
            LOSS_RATIO * forward_s if loss_s is None else loss_s,
        )

    def _times(self, name: str, what: str, of: Sequence[int]) -> Floats | None:
        """(P,); None if no peer has measured it. Only gaps of the peers `of` are told."""
        entries = self._list(name) or []
        named = zip(self._names, entries, strict=False)
        values = np.array(
            [_number(value, f"{name} of {peer}", zero=False) for peer, value in named]
        )
        return None if np.isnan(values).all() else self._filled(values, what, list(of))

    def _filled(self, values: Floats, what: str, of: Any = slice(None)) -> Floats:
        """With the median for what is not measured, which is told of the entries `of`."""
        missing: NDArray[np.bool_] = np.isnan(values)
        if missing.any():
            if gaps := missing[of].sum():
                self._gaps.append(f"{gaps} of {missing[of].size} {what}")
            values[missing] = statistics.median(values[~missing].tolist())
        return values

    def _stages(self) -> Groups | None:
        entries = self._list("stage")
        if entries is None:
            return None
        for peer, stage in zip(self._names, entries, strict=True):
            if type(stage) is not int or stage < 0:
                raise ValueError(
                    f"stage of {peer} is {stage!r}; it must be a number from 0 on, or leave "
                    "`stage` out to have the peers placed"
                )
        stages = max(entries) + 1
        groups = tuple(
            tuple(peer for peer, served in enumerate(entries) if served == stage)
            for stage in range(stages)
        )
        if () in groups:
            raise ValueError(
                f"stage {groups.index(())} is served by no peer, but stage {stages - 1} is; each "
                "stage needs a peer"
            )
        return groups

    def _memory(self) -> tuple[int, ...] | None:
        """None if no peer has measured it."""
        entries = self._list("memory") or []
        for peer, visits in zip(self._names, entries, strict=False):
            if visits is not None and (type(visits) is not int or visits < 1):
                raise ValueError(f"memory of {peer} is {visits!r}; it must be at least 1 visit")
        measured = [visits for visits in entries if visits is not None]
        if not measured:
            return None
        if gaps := len(entries) - len(measured):
            self._gaps.append(f"{gaps} of {len(entries)} memories")
        median = statistics.median_low(measured)
        return tuple(median if visits is None else visits for visits in entries)

    def _integer(self, name: str, least: int = 1) -> int | None:
        value = self._entries.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        return value

    def _skip(self) -> float | None:
        value = self._entries.get("skip")
        if value is not None and (type(value) not in (int, float) or not 0 <= value < 1):
            raise ValueError(f"skip is {value!r}; it must be at least 0 and below 1")
        return None if value is None else float(value)

    def _list(self, name: str) -> list[Any] | None:
        """With an entry for each peer."""
        entries, peers = self._entries.get(name), len(self._names)
        if entries is not None and (not isinstance(entries, list) or len(entries) != peers):
            has = f"{len(entries)} entries" if isinstance(entries, list) else "no list"
            raise ValueError(f"{name} has {has}; it needs one for each of {peers} peers")
        return entries


def _number(value: object, where: str, *, zero: bool) -> float:
    """NaN for null, which is not measured."""
    if value is None:
        return math.nan
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (value > 0 or (zero and value == 0))
    ):
        return float(value)
    least = "at least 0" if zero else "above 0"
    raise ValueError(f"{where} is {value!r}; it must be a number {least}, or null")
