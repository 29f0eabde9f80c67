"""When an iteration of a stage is over, and whether what was counted in it can be vouched for. How
origins report to that end, and how long each is waited for: docs/adr/0012."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.membership import Member, Phase
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.stage_call import PeerProcess, StageCallKey
from murmuration.worker.training.mailbox import IterationOver
from murmuration.worker.transport import Method, TransportError

_PATIENCE_S = 2.0
_STAGE_S = 4.5  # for each stage of the model, from the first report on, until the last is in
_USUAL, _LATELY = 4, 16  # or so many times as long as the first report took of late
# An origin is late after so long, or `_USUAL` first reports; it is given up after so many late
# microbatches a stage, so that a late replica is noticed first.
_SOON_S, _STRIKES = 2.0, 3
_MOST_UNLIKE, _LEFT_OUT = 12, 64  # four reports that lack what was sent; then 52 iterations without
_MOST_AHEAD = 8  # iterations: a peer that says to be further is not waited for
_PROCESSES = 2  # of a peer that are told apart: the one that was started again, and that before
_REPORT_S = 2.0
_AGAIN_S = 0.25

_Share = tuple[int, PeerProcess]  # an iteration, and the origin whose microbatches are meant
Way = tuple[str, str]  # an origin, and the peer that handed its microbatches on
# Microbatches whose origin is gone: those that it had sent here itself, and those in this sum.
_Orphans = tuple[frozenset[int], frozenset[int]]


class IterationTracker:
    """The iterations of one peer; sans-I/O. Times are monotonic seconds. `ended` is the latest that
    is over; origins that are `given_up` have not reported in time, and are not waited for."""

    def __init__(self, iteration: int = 0, stages: int = 1, microbatches: int = 1) -> None:
        self.iteration, self._stages = iteration, stages
        self.ended, self.given_up = 0, set[str]()
        self._seen_at = list[float]()  # this iteration, and its first report
        self._first_s = deque[float](maxlen=_LATELY)  # from the one to the other
        self._awaited, self._late, self._unlike = set[str](), Counter[str](), Counter[Way]()
        self._doubted = Counter[str]()  # in whose name an unconfirmed process was heard of of late
        # A late iteration, or one whose report does not fit, counts 4, and each that begins takes
        # 1 away.
        self._most_late = 3 * (2 + -(-_STRIKES * stages // microbatches))
        self._mine = defaultdict[_Share, dict[int, str]](dict)  # and who handed it on
        self._began = defaultdict[_Share, set[int]](set)
        self._reported: dict[_Share, frozenset[int]] = {}
        self._orphans: dict[_Share, _Orphans] = {}
        self._missed_since: dict[PeerProcess, float] = {}
        self._heard: dict[PeerProcess, int] = {}  # the latest iteration that it has sent word of
        self._unconfirmed_since: dict[PeerProcess, float] = {}

    def begin(self, iteration: int) -> None:
        """This peer goes on to an iteration, or back to one; earlier ones are forgotten."""
        self.iteration, self.ended = iteration, min(self.ended, iteration - 1)
        self._missed_since.clear()
        self._seen_at, self._awaited = [], set()
        self._late -= Counter([*self._late])  # a late iteration is made up for by three others
        self._unlike -= Counter([*self._unlike])
        self._doubted -= Counter([*self._doubted])
        for shares in (self._mine, self._began):
            for key in [key for key in shares if key[0] < iteration]:
                del shares[key]
        near = range(iteration - _MOST_AHEAD, iteration + _MOST_AHEAD + 1)
        self._reported = {k: v for k, v in self._reported.items() if iteration <= k[0] <= near[-1]}
        self._heard = {origin: at for origin, at in self._heard.items() if at in near}
        since = self._unconfirmed_since
        self._unconfirmed_since = {o: at_s for o, at_s in since.items() if o in self._heard}

    def is_over(self, iteration: int) -> bool:
        """Tells whether this peer's sum of an iteration is complete, or it is at a later one."""
        return self.iteration > iteration or self.ended >= iteration

    def is_far(self, iteration: int) -> bool:
        """Tells whether this peer has begun, and will not be at that iteration for long."""
        return 0 < self.iteration < iteration - _MOST_AHEAD

    @property
    def left_out(self) -> set[Way]:
        """The ways by which was counted here, again and again, what was not reported."""
        return {way for way, times in self._unlike.items() if times > _MOST_UNLIKE}

    @property
    def orphaned(self) -> int:
        """The microbatches that are lost with their origins, of those that these had sent here."""
        return sum(len(began) for began, _ in self._orphans.values())

    def orphans(self, iteration: int) -> dict[PeerProcess, _Orphans]:
        """The (began, counted) microbatches of each origin that is gone, once all is over."""
        return {key[1]: left for key, left in self._orphans.items() if key[0] == iteration}

    def heard(self, iteration: int, origin: PeerProcess) -> None:
        """Word of an origin has come that is at this iteration."""
        if not self.is_far(iteration):
            self._heard[origin] = max(iteration, self._heard.get(origin, 0))
            for old in sorted(o for o in self._heard if o.peer == origin.peer)[:-_PROCESSES]:
                del self._heard[old]

    def began(self, key: StageCallKey) -> None:
        """An origin has sent a microbatch here, before any other peer."""
        self._began[key.iteration, key.origin].add(key.microbatch)
        self.heard(key.iteration, key.origin)

    def counted(self, key: StageCallKey, by: str = "") -> bool:
        """A gradient is in this stage's sum, or may be soon. Returns whether that is new. Args: by:
        the peer that handed it on; none: its origin."""
        self.heard(key.iteration, key.origin)
        mine = self._mine[key.iteration, key.origin]
        new = key.microbatch not in mine
        mine.setdefault(key.microbatch, by or key.origin.peer)
        return new

    def failed(self, key: StageCallKey) -> None:
        """The gradient is not in the sum, and will not be."""
        self._mine.get((key.iteration, key.origin), {}).pop(key.microbatch, None)

    def reported(self, iteration: int, origin: PeerProcess, counted: Iterable[int]) -> None:
        """An origin reports at the end of an iteration, maybe one that was thought to be gone."""
        self._orphans.pop((iteration, origin), None)
        self.heard(iteration, origin)
        if not self.iteration:  # not begun yet: of each origin the latest report may be of use
            self._reported = {k: v for k, v in self._reported.items() if k[1].peer != origin.peer}
        if iteration >= self.iteration and not self.is_far(iteration):
            self._reported[iteration, origin] = frozenset(counted)
            same = [o for at, o in self._reported if at == iteration and o.peer == origin.peer]
            for old in sorted(same)[:-_PROCESSES]:
                del self._reported[iteration, old]

    def over(self, origins: Iterable[Member], now: float) -> IterationOver | None:
        """Tells whether every origin that is still there has finished the iteration. `origins` are
        all replicas of stage 0, gone or not; others, and earlier processes, count as gone."""
        self._seen_at = self._seen_at or [now]
        someone, unlike = False, set[Way]()
        gone: list[_Share] = []
        awaited: list[_Share] = []
        newest = (self._newest(member, now) for member in origins)
        members = {PeerProcess.of(member): member for member in newest}
        known = {origin for at, origin in (*self._began, *self._mine) if at == self.iteration}
        for origin in (*members, *sorted(known - members.keys())):
            key, member = (self.iteration, origin), members.get(origin)
            mine, reported = self._mine.get(key, {}), self._reported.get(key)
            if reported is not None:
                self.given_up.discard(origin.peer)
            elif member is not None and self._has_gone_on(member, bool(mine), now):
                reported = frozenset()
            elif member is not None and self._takes_part(member):
                awaited.append(key)
                continue
            else:
                gone.append(key)
                continue
            someone = True
            unlike |= {(origin.peer, mine[each]) for each in mine.keys() - reported}
        here = {origin.peer for at, origin in self._reported if at == self.iteration}
        if not someone or self._waits({origin.peer for _, origin in awaited}, here, now):
            return None
        self.ended, discard = self.iteration, bool(unlike)
        for way in unlike:
            self._unlike[way] += 4
            if self._unlike[way] > _MOST_UNLIKE:
                self._unlike[way] = _LEFT_OUT
        for key in (*gone, *awaited):
            began, summed = (frozenset(of.get(key, ())) for of in (self._began, self._mine))
            if began or summed:
                self._orphans[key] = began, frozenset() if discard else summed
        return IterationOver(self.iteration, discard)

    def _waits(self, origins: set[str], reported: set[str], now: float) -> bool:
        """Tells whether these origins, which are there and have not reported, are waited for."""
        if len(self._seen_at) < 2:
            self._seen_at.append(now)
            self._first_s.append(now - self._seen_at[0])
        waited_s, usual_s = now - self._seen_at[1], _USUAL * median(self._first_s)
        if waited_s >= max(_STAGE_S * self._stages, usual_s):
            self.given_up |= origins
        if waited_s >= max(_SOON_S, usual_s):
            self._late.update(dict.fromkeys(self._awaited & reported, 4))
            self.given_up |= {peer for peer in origins if self._late[peer] > self._most_late}
        self._awaited = origins
        return not origins <= self.given_up

    def _newest(self, member: Member, now: float) -> Member:
        """As of the latest process. One that gossip does not confirm in time is forgotten."""
        since, confirmed = self._unconfirmed_since, PeerProcess.of(member)
        ahead = [o for o in self._heard if o.peer == member.peer and o > confirmed]
        for origin in ahead:
            if self._doubted[member.peer] or now - since.setdefault(origin, now) >= _PATIENCE_S:
                self._doubted[member.peer] = self._doubted[member.peer] or _LEFT_OUT
                del self._heard[origin]
                since.pop(origin, None)
        latest = max((o for o in ahead if o in self._heard), default=confirmed)
        if latest == confirmed:
            return member
        return replace(member, start_ms=latest.start_ms, phase=Phase.STARTING, step=0)

    def _takes_part(self, member: Member) -> bool:
        """Tells whether to wait for an origin's report. A joiner may take its time to fetch a
        state; one that was heard in the last iteration is no joiner, whatever gossip says."""
        heard = self._heard.get(PeerProcess.of(member), -1)  # an earlier process's do not count
        if member.phase is Phase.STARTING:
            return member.live and heard + 1 >= self.iteration
        if member.phase is Phase.READY:
            return member.live and max(member.step, heard) + 1 >= self.iteration
        return member.live and member.phase in (Phase.TRAINING, Phase.DONE)

    def _has_gone_on(self, member: Member, counted: bool, now: float) -> bool:
        """Says whether the origin is further: its report is lost, or no use if none counted."""
        me = PeerProcess.of(member)
        if any(at > self.iteration and origin == me for at, origin in self._reported):
            return True
        if member.step < self.iteration:
            return False
        if not counted:
            return True
        return now - self._missed_since.setdefault(me, now) >= _PATIENCE_S


async def report_iteration(
    context: StageContext, origin: PeerProcess, peer: str, iteration: int, counted: Sequence[int]
) -> None:
    """Reports the microbatches that came back by way of a peer until it has the report, and has
    ended the iteration if it has counted some; or is gone, or far back. io thread only. `origin` is
    this peer, as its calls have named it. They may be `unconfirmed`, then `lost` or `confirmed`."""
    first = member = context.member(peer)
    named: dict[str, Any] = {"run": context.run, "origin": origin.peer, "start_ms": origin.start_ms}
    report = pb.FinishedRequest(**named, iteration=iteration, counted=counted)
    request = report.SerializeToString()
    about = {"iteration": iteration, "replica": peer, "microbatches": list(counted)}
    unconfirmed, over, call = False, False, context.transport.call
    while not over and member is not None and member.live:
        try:
            answer = await call(member.address, Method.FINISHED, request, _REPORT_S, peer)
            over = not counted or wire.parse(pb.FinishedReply, answer).over
        except (TransportError, wire.WireError):
            context.suspect(peer)
            if counted and not unconfirmed:
                context.event("unconfirmed", **about)
                unconfirmed = True
        if not over:
            await asyncio.sleep(_AGAIN_S)
        member, me = context.member(peer), context.member(context.me)
        if member is not None and first is not None and member.start_ms != first.start_ms:
            member = None  # a later process has counted nothing
        if me is None or me.step > iteration + _MOST_AHEAD:
            break
    if counted and not over and (member is None or member.step < iteration):
        context.counts.lost += len(counted)
        context.event("lost", **about)
    elif unconfirmed:
        context.event("confirmed", **about)
