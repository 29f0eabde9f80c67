"""Locates faults: what this peer measures of itself and of its links, compared with the others."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from murmuration.algorithms.diagnosis import MEDIAN_OF, Diagnosis, PeerFigures, Verdict
from murmuration.protos.documents import BadDocument, unpack
from murmuration.protos.events import float_of, int_of, new_event
from murmuration.worker.background import Component
from murmuration.worker.exchange.measured import Arrivals
from murmuration.worker.status.document import ask_peers
from murmuration.worker.views.summary import map_of

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

LOOK_S = 5.0
_AT_ONCE = 16  # peers that one look asks
_OLD_S = 60.0  # an answer that counts no more
_ANSWER_BYTES = 64 * 1024
_MOST_PAST = 256
_SAVES = 3
_OLD_ROUNDS = 64  # since a peer has sent something: then it is not told any more
_MOST_SENDERS = 64
_COUNTS = ("rounds", "steps", "saves")
_TIMES = ("round_s", "stall_s", "step_s", "save_s")


class OwnFigures:
    """The figures of the last rounds. io thread only, but `saved`."""

    def __init__(self, peer: str, arrivals: Arrivals, clock: Callable[[], float]) -> None:
        self.peer, self._arrivals, self._clock = peer, arrivals, clock
        self._rounds = self._saves = 0
        self._ended_s: float | None = None
        self._round_s: deque[float] = deque(maxlen=MEDIAN_OF)
        self._stall_s: deque[float] = deque(maxlen=MEDIAN_OF)
        self._steps: deque[tuple[int, float]] = deque(maxlen=MEDIAN_OF)
        self._save_s: deque[float] = deque(maxlen=_SAVES)
        # By sender: round, Mbit/s and seconds of what came in it.
        self._received: dict[str, deque[tuple[int, float, float]]] = {}

    def round_ended(self) -> None:
        now, self._rounds = self._clock(), self._rounds + 1
        if self._ended_s is not None:
            self._round_s.append(now - self._ended_s)
        self._ended_s = now
        for sender, (payload_bytes, seconds) in self._arrivals.taken().items():
            came = self._received.setdefault(sender, deque(maxlen=MEDIAN_OF))
            came.append((self._rounds, 8e-6 * payload_bytes / max(seconds, 1e-6), seconds))
        latest = sorted(self._received.items(), key=lambda each: -each[1][-1][0])[:_MOST_SENDERS]
        late = self._rounds - _OLD_ROUNDS
        self._received = {peer: came for peer, came in latest if came[-1][0] > late}

    def applied(self, event: Mapping[str, object]) -> None:
        self._stall_s.append(float_of(event, "stall_s") or 0.0)
        steps, step_s = int_of(event, "steps"), float_of(event, "step_s")
        if steps and step_s is not None:
            self._steps.append((steps, step_s))

    def saved(self, seconds: float) -> None:
        """A checkpoint was written. any thread."""
        self._save_s.append(seconds)
        self._saves += 1

    def figures(self) -> PeerFigures:

        def median(values: Iterable[float]) -> float | None:
            return statistics.median(known) if (known := list(values)) else None

        return PeerFigures(
            peer=self.peer,
            rounds=self._rounds,
            round_s=median(self._round_s),
            stall_s=statistics.fmean(self._stall_s) if self._stall_s else None,
            step_s=median(step_s for _, step_s in self._steps),
            steps=median(steps for steps, _ in self._steps) or 0.0,
            saves=self._saves,
            save_s=median(self._save_s),
            received={
                peer: (
                    statistics.median(mbps for _, mbps, _ in came),
                    statistics.median(seconds for _, _, seconds in came),
                )
                for peer, came in self._received.items()
            },
        )


def to_document(figures: PeerFigures) -> dict[str, object]:
    return {
        **{key: getattr(figures, key) for key in _COUNTS},
        **{key: _short(getattr(figures, key)) for key in _TIMES},
        "received": {
            peer: {"mbps": _short(mbps), "seconds": _short(seconds)}
            for peer, (mbps, seconds) in figures.received.items()
        },
    }


def from_document(peer: str, document: Mapping[str, Any]) -> PeerFigures:
    """The figures of another peer as it tells them; those that do not fit count as missing."""
    came: dict[str, tuple[float, float]] = {}
    received = map_of(document, "received")
    for sender in islice(received, _MOST_SENDERS):
        mbps, seconds = (float_of(map_of(received, sender), key) for key in ("mbps", "seconds"))
        if mbps is not None and seconds is not None:
            came[sender] = (mbps, seconds)
    return PeerFigures(
        peer=peer,
        rounds=int_of(document, "rounds") or 0,
        steps=float_of(document, "steps") or 0.0,
        saves=int_of(document, "saves") or 0,
        received=came,
        **{key: float_of(document, key) for key in _TIMES},
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


class FaultLocator(Component):
    """Finds and tells which peer, link or disk is slow. io thread only. Args: as `diagnose`."""

    def __init__(self, own: OwnFigures, host: "Node", *, in_turn: bool) -> None:
        self._own, self._host, self._clock = own, host, host.clock
        self._since_1970_s = time.time() - self._clock()
        self._diagnosis = Diagnosis(own.peer, in_turn=in_turn)
        self._answers: dict[str, tuple[float, PeerFigures]] = {}  # (when, what)
        self._turn, self._next_s = 0, self._clock() + LOOK_S
        self._past: deque[dict[str, object]] = deque(maxlen=_MOST_PAST)

    def tick(self) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + LOOK_S
            self._host.spawn(self.look())

    async def look(self) -> None:
        live = asked = [member for member in self._host.gossip.replicas if member.live]
        if len(live) > _AT_ONCE:
            start, self._turn = self._turn % len(live), self._turn + _AT_ONCE
            asked = [*live, *live][start : start + _AT_ONCE]
        for peer, packed in (await ask_peers(asked, self._host.transport, "measured")).items():
            with suppress(BadDocument):
                measured = unpack(packed, _ANSWER_BYTES).get("measured")
                if isinstance(measured, dict):
                    self._answers[peer] = self._clock(), from_document(peer, measured)
        names, old_s = {member.peer for member in live}, self._clock() - _OLD_S
        kept = {p: told for p, told in self._answers.items() if p in names and told[0] >= old_s}
        self._answers = kept
        everyone = [self._own.figures(), *(figures for _, figures in kept.values())]
        for fault, found in self._diagnosis.update(self._clock(), everyone):
            verdict = self._plain(fault)
            if not found:
                verdict["until"] = self._date(self._clock())
                self._past.append(verdict)
            self._host.log(new_event("located", found=found, verdict=verdict))
            if found and fault.place.peer == self._own.peer:
                self._host.on_slow(fault.place.kind)

    def verdicts(self) -> list[dict[str, object]]:
        return [self._plain(verdict) for verdict in self._diagnosis.verdicts]

    def history(self) -> list[dict[str, object]]:
        """The faults that have gone, with the time of that, and those that hold."""
        return [*self._past, *self.verdicts()]

    def _plain(self, verdict: Verdict) -> dict[str, object]:
        place = verdict.place
        return {
            "kind": place.kind,
            "peer": place.peer,
            **({"to": place.to} if place.to else {}),
            "measured": float(f"{verdict.measured:.3g}"),
            "usual": float(f"{verdict.usual:.3g}"),
            "unit": "s" if place.kind in ("machine", "disk") else "mbps",
            "cost": round(verdict.cost, 4),
            "since": self._date(verdict.since_s),
        }

    def _date(self, at_s: float) -> str:
        at = datetime.fromtimestamp(self._since_1970_s + at_s)
        return at.astimezone().isoformat(timespec="seconds")
