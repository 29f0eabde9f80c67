"""Locates faults: asks the other peers for what they have measured, and compares.

Every peer does so by itself, and believes nobody more than the median of the others. An answer has
some hundred bytes; in a large swarm a peer asks some at a time, in turn.
"""

import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from murmuration.algorithms.diagnosis import Change, Diagnosis, PeerFigures, Verdict
from murmuration.protos.documents import BadDocument, unpack
from murmuration.protos.events import new_event
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Member
from murmuration.worker.status.document import ask_peers
from murmuration.worker.status.figures import OwnFigures, from_document
from murmuration.worker.transport import Transport

LOOK_S = 5.0
_AT_ONCE = 16  # peers that one look asks
_OLD_S = 60.0  # an answer that counts no more
_ANSWER_BYTES = 64 * 1024
_MOST_PAST = 256


class LocatorHost(Protocol):
    """The node. io thread only."""

    @property
    def replicas(self) -> Sequence[Member]:
        """The others that train the same as this peer."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs a coroutine in the background."""
        ...


@dataclass(frozen=True)
class _Answer:
    at_s: float
    figures: PeerFigures


class FaultLocator:
    """A component of the node. io thread only.

    Args:
        own: what this peer has measured.
        host, transport: whom to ask, and how.
        in_turn: whether a peer sends to one at a time, as in pairs.
        clock: monotonic seconds.
        log: takes an event for each fault that is found, and each that has gone.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        own: OwnFigures,
        host: LocatorHost,
        transport: Transport,
        *,
        in_turn: bool,
        clock: Callable[[], float],
        log: Callable[[dict[str, object]], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._own, self._host, self._transport = own, host, transport
        self._clock, self._log, self._since_1970_s = clock, log, wall() - clock()
        self._diagnosis = Diagnosis(in_turn=in_turn)
        self._answers: dict[str, _Answer] = {}
        self._turn, self._next_s = 0, clock() + LOOK_S
        self._past: deque[dict[str, object]] = deque(maxlen=_MOST_PAST)

    def tick(self) -> None:
        """Looks again when it is time."""
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + LOOK_S
            self._host.spawn(self.look())

    def on_view(self, view: View) -> None:
        """Nothing follows from it before the next look."""

    async def close(self) -> None:
        """A look that is under way ends with the node."""

    async def look(self) -> None:
        """Asks some of the others, and says what has changed."""
        live = [member for member in self._host.replicas if member.live]
        names = {member.peer for member in live}
        answers = await ask_peers(self._in_turn(live), self._transport, "measured")
        for peer, packed in answers.items():
            self._heard(peer, packed)
        old_s = self._clock() - _OLD_S
        self._answers = {
            peer: answer
            for peer, answer in self._answers.items()
            if peer in names and answer.at_s >= old_s
        }
        everyone = [self._own.figures(), *(answer.figures for answer in self._answers.values())]
        for change in self._diagnosis.update(self._clock(), everyone):
            self._tell(change)

    def verdicts(self) -> list[dict[str, object]]:
        """The faults that hold, as plain values, the most costly first."""
        return [self._plain(verdict) for verdict in self._diagnosis.verdicts]

    def history(self) -> list[dict[str, object]]:
        """Those that have gone, with the time of that, and those that hold."""
        return [*self._past, *self.verdicts()]

    # --------------------------------------------------------------------------------- inside

    def _in_turn(self, live: Sequence[Member]) -> list[Member]:
        if len(live) <= _AT_ONCE:
            return list(live)
        start, self._turn = self._turn % len(live), self._turn + _AT_ONCE
        return [*live, *live][start : start + _AT_ONCE]

    def _heard(self, peer: str, packed: bytes) -> None:
        try:
            measured = unpack(packed, _ANSWER_BYTES).get("measured")
        except BadDocument:
            return
        if isinstance(measured, dict):
            self._answers[peer] = _Answer(self._clock(), from_document(peer, measured))

    def _tell(self, change: Change) -> None:
        verdict = self._plain(change.verdict)
        if not change.found:
            verdict["until"] = self._date(self._clock())
            self._past.append(verdict)
        self._log(new_event("located", found=change.found, verdict=verdict))

    def _plain(self, verdict: Verdict) -> dict[str, object]:
        """As it stands in a status document, an event and a report."""
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
