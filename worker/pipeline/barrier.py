"""When an iteration of a stage is over, and whether what was counted in it can be vouched for.

A peer whose answer got lost has counted a microbatch that another replica was then asked for. So
each origin reports at the end which microbatches came back by way of which peers. A stage that has
counted others discards its whole iteration, and says so.

An origin that is gone reports nothing. Its microbatches are lost, with what stage 0 had of them;
the peers that had them straight from it count them as lost. A gradient of them that another stage
has counted stays in its sum. The same holds for an earlier incarnation of an origin that has
started again. Word of the new one may be here before gossip tells of it. But anybody can send such
word, so an incarnation that gossip does not confirm is not waited for for long.

An origin that is there and never reports is waited for longer than a microbatch that is held up,
and then no more, until a report of it comes in time.

A peer answers a report when the iteration is over there, with its sum complete. Until then what it
has counted may die with it, although it has this origin's report, while it waits for another's.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.membership import Member, Phase
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.stage_call import Incarnation, StageCallKey
from murmuration.worker.training.mailbox import IterationOver
from murmuration.worker.transport import Method, TransportError

_PATIENCE_S = 2.0
_STAGE_S = 15.0  # for each stage of the model, from the first report on, until the last is in
_USUAL, _LATELY = 4, 16  # or so many times the longest of late
_MOST_AHEAD = 8  # iterations: a peer that says to be further is not waited for
_REPORT_S = 2.0
_AGAIN_S = 0.25
_HOLD_S = 0.5  # an answer is held back; well below _REPORT_S


@dataclass(frozen=True)
class Orphans:
    """Of an iteration's microbatches whose origin is gone: those that it had sent here, to the
    first peer of their routes, and those in this stage's sum."""

    began: frozenset[int]
    counted: frozenset[int]


class IterationTracker:
    """One peer's; sans-I/O. Times are monotonic seconds.

    Attributes:
        given_up: origins that are not waited for: they have not reported in time.
    """

    def __init__(self, iteration: int = 0, stages: int = 1) -> None:
        self.iteration, self._stages = iteration, stages
        self.given_up: set[str] = set()
        self._first_at: float | None = None  # when the first report of this iteration was here
        self._spread_s: deque[float] = deque(maxlen=_LATELY)  # until the last one was
        self.ended = 0  # the latest iteration that was found to be over
        self._mine: dict[tuple[int, Incarnation], set[int]] = {}
        self._began: dict[tuple[int, Incarnation], set[int]] = {}
        self._reported: dict[tuple[int, Incarnation], frozenset[int]] = {}
        self._orphans: dict[tuple[int, Incarnation], Orphans] = {}
        self._missed_since: dict[Incarnation, float] = {}
        self._heard: dict[Incarnation, int] = {}  # the latest iteration that it has sent word of
        self._unconfirmed_since: dict[Incarnation, float] = {}

    def begin(self, iteration: int) -> None:
        """This peer goes on to an iteration, or back to one; earlier ones are forgotten."""
        self.iteration, self.ended = iteration, min(self.ended, iteration - 1)
        self._missed_since.clear()
        self._first_at = None
        self._mine = {key: mine for key, mine in self._mine.items() if key[0] >= iteration}
        self._began = {key: began for key, began in self._began.items() if key[0] >= iteration}
        near = range(iteration - _MOST_AHEAD, iteration + _MOST_AHEAD + 1)
        self._reported = {
            key: counted
            for key, counted in self._reported.items()
            if iteration <= key[0] <= near[-1]
        }
        self._heard = {origin: at for origin, at in self._heard.items() if at in near}
        self._unconfirmed_since = {
            origin: since
            for origin, since in self._unconfirmed_since.items()
            if origin in self._heard
        }

    def is_over(self, iteration: int) -> bool:
        """Whether this peer's sum of an iteration is complete, or it is at a later one."""
        return self.iteration > iteration or self.ended >= iteration

    def is_far(self, iteration: int) -> bool:
        """Whether this peer has begun, and will not be at that iteration for long."""
        return 0 < self.iteration < iteration - _MOST_AHEAD

    @property
    def orphaned(self) -> int:
        """The microbatches that are lost with their origins, of those that these had sent here."""
        return sum(len(orphans.began) for orphans in self._orphans.values())

    def orphans(self, iteration: int) -> dict[Incarnation, Orphans]:
        """By origin, of an iteration that is over."""
        return {key[1]: left for key, left in self._orphans.items() if key[0] == iteration}

    def heard(self, iteration: int, origin: Incarnation) -> None:
        """Word of an origin has come that is at this iteration."""
        if not self.is_far(iteration):
            self._heard[origin] = max(iteration, self._heard.get(origin, 0))

    def began(self, key: StageCallKey) -> None:
        """An origin has sent a microbatch here, before any other peer."""
        self._began.setdefault((key.iteration, key.origin), set()).add(key.microbatch)
        self.heard(key.iteration, key.origin)

    def counted(self, key: StageCallKey) -> bool:
        """A microbatch's gradient is in this stage's sum, or may be at any moment. Returns whether
        that is new."""
        self.heard(key.iteration, key.origin)
        mine = self._mine.setdefault((key.iteration, key.origin), set())
        new = key.microbatch not in mine
        mine.add(key.microbatch)
        return new

    def failed(self, key: StageCallKey) -> None:
        """The gradient is not in the sum, and will not be."""
        self._mine.get((key.iteration, key.origin), set()).discard(key.microbatch)

    def reported(self, iteration: int, origin: Incarnation, counted: Iterable[int]) -> None:
        """An origin reports at the end of an iteration, maybe one that was thought to be gone."""
        self._orphans.pop((iteration, origin), None)
        self.heard(iteration, origin)
        if not self.iteration:  # not begun yet: of each origin the latest report may be of use
            self._reported = {
                key: counted
                for key, counted in self._reported.items()
                if key[1].peer != origin.peer
            }
        if iteration >= self.iteration and not self.is_far(iteration):
            self._reported[iteration, origin] = frozenset(counted)

    def over(self, origins: Iterable[Member], now: float) -> IterationOver | None:
        """Whether every origin that is still there has finished the iteration.

        Args:
            origins: all replicas of stage 0, gone or not. One that has left stage 0 in this
                iteration is not among them, and counts as gone; so does an earlier incarnation.
        """
        someone = discard = False
        gone: list[tuple[int, Incarnation]] = []
        awaited: list[tuple[int, Incarnation]] = []
        newest = (self._newest(member, now) for member in origins)
        members = {Incarnation.of(member): member for member in newest}
        known = {origin for at, origin in (*self._began, *self._mine) if at == self.iteration}
        for origin in (*members, *sorted(known - members.keys())):
            key, member = (self.iteration, origin), members.get(origin)
            mine, reported = self._mine.get(key, set()), self._reported.get(key)
            if reported is not None:
                someone, discard = True, discard or reported != mine
                self.given_up.discard(origin.peer)
            elif member is not None and self._has_gone_on(member, bool(mine), now):
                someone, discard = True, discard or bool(mine)
            elif member is not None and self._takes_part(member):
                awaited.append(key)
            else:
                gone.append(key)
        if not someone or self._waits({origin.peer for _, origin in awaited}, now):
            return None
        gone += awaited
        self.ended = self.iteration
        for key in gone:
            began, mine = self._began.get(key, set()), self._mine.get(key, set())
            if began or mine:
                summed = frozenset() if discard else frozenset(mine)
                self._orphans[key] = Orphans(frozenset(began), summed)
        return IterationOver(self.iteration, discard)

    def _waits(self, origins: set[str], now: float) -> bool:
        """Whether these origins, which are there and have not reported, are waited for."""
        if self._first_at is None:
            self._first_at = now
        waited_s = now - self._first_at
        if waited_s >= max(_STAGE_S * self._stages, _USUAL * max(self._spread_s, default=0.0)):
            self.given_up |= origins
        if origins <= self.given_up:
            if not origins:
                self._spread_s.append(waited_s)
            return False
        return True

    def _newest(self, member: Member, now: float) -> Member:
        """As of the origin's latest incarnation, of which word may be here before gossip. One that
        gossip does not tell of in time is forgotten, until it is heard again."""
        since, confirmed = self._unconfirmed_since, Incarnation.of(member)
        ahead = [o for o in self._heard if o.peer == member.peer and o > confirmed]
        for origin in ahead:
            if now - since.setdefault(origin, now) >= _PATIENCE_S:
                del self._heard[origin], since[origin]
        latest = max((o for o in ahead if o in self._heard), default=confirmed)
        if latest == confirmed:
            return member
        return replace(member, epoch=latest.epoch, phase=Phase.STARTING, step=0)

    def _takes_part(self, member: Member) -> bool:
        """Whether to wait for an origin's report: it begins microbatches in this iteration, or has.
        A joiner that fetches a state from long ago may take its time. But gossip is slower than an
        iteration, and an origin that has sent word of the last one is no joiner any more."""
        heard = self._heard.get(Incarnation.of(member), -1)  # an earlier incarnation's do not count
        if member.phase is Phase.STARTING:
            return member.live and heard + 1 >= self.iteration
        if member.phase is Phase.READY:
            return member.live and max(member.step, heard) + 1 >= self.iteration
        return member.live and member.phase in (Phase.TRAINING, Phase.DONE)

    def _has_gone_on(self, member: Member, counted: bool, now: float) -> bool:
        """Whether the origin is further than this iteration. Then its report is lost, or of no use,
        where nothing of it was counted."""
        if any(
            i > self.iteration and origin == Incarnation.of(member) for i, origin in self._reported
        ):
            return True
        if member.step < self.iteration:
            return False
        if not counted:
            return True
        return now - self._missed_since.setdefault(Incarnation.of(member), now) >= _PATIENCE_S


async def report_iteration(
    context: StageContext,
    origin: Incarnation,
    peer: str,
    iteration: int,
    counted: Sequence[int],
) -> None:
    """Reports to a peer until it has the report, and has ended the iteration if it has counted
    something in it; or until the peer is gone, and with it what it has counted. io thread only.

    A peer that does not answer is known to be gone only seconds later. What it has counted is
    logged as `unconfirmed` at once, for this origin may be gone itself by then. Later it is logged
    as `lost` or `confirmed`.

    Args:
        origin: this peer, as its calls of the iteration have named it.
        counted: the microbatches that came back by way of the peer.
    """
    first = member = context.member(peer)
    request = pb.FinishedRequest(
        run=context.run,
        origin=origin.peer,
        epoch=origin.epoch,
        iteration=iteration,
        counted=counted,
    ).SerializeToString()
    log_event = partial(
        context.event, iteration=iteration, replica=peer, microbatches=list(counted)
    )
    unconfirmed = over = False
    while not over and member is not None and member.live:
        try:
            answer = await context.transport.call(
                member.address, Method.FINISHED, request, _REPORT_S, member.peer
            )
            over = not counted or wire.parse(pb.FinishedReply, answer).over
        except (TransportError, wire.WireError):
            context.suspect(peer)
            if counted and not unconfirmed:
                log_event("unconfirmed")
                unconfirmed = True
            await asyncio.sleep(_AGAIN_S)
        member = context.member(peer)
        if member is not None and first is not None and member.epoch != first.epoch:
            member = None  # a later incarnation has counted nothing
    if counted and not over and (member is None or member.step < iteration):
        context.counts.lost += len(counted)
        log_event("lost")
    elif unconfirmed:
        log_event("confirmed")


class BarrierReceiver:
    """A stage's side. io thread only.

    Args:
        reported: called after each report: the iteration may be over now.
    """

    def __init__(self, run: int, tracker: IterationTracker, reported: Callable[[], None]) -> None:
        self._run, self._tracker, self._reported = run, tracker, reported
        self._turned = asyncio.Event()

    def turned(self) -> None:
        """An iteration is over, or another has begun."""
        self._turned.set()
        self._turned = asyncio.Event()

    async def answer(self, request: bytes) -> bytes:
        """Handles an origin's report. Raises WireError."""
        finished, tracker = wire.parse(pb.FinishedRequest, request), self._tracker
        if finished.run != self._run:
            raise wire.WireError("a report on another run")
        origin = Incarnation(finished.origin, finished.epoch)
        tracker.reported(finished.iteration, origin, finished.counted)
        self._reported()
        if finished.counted:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_S):
                    while not tracker.is_over(finished.iteration):
                        await self._turned.wait()
        over = tracker.is_over(finished.iteration)
        return pb.FinishedReply(over=over).SerializeToString()
