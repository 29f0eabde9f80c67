"""All pair rounds of one peer: which there are, who is admitted to them, and how they end.

A round is laid out as soon as its group can be known, and the anchor goes ahead on its streams
(`partner`) while no round is on its way. `begin` adds the contribution, and from then on the rules
of the round (`round`) decide. A round that is over stays laid out for two more: partners that
missed the last word hear it again. What is decided for several streams is decided without
`await`.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from murmuration.algorithms.draws import Pair, groups, membership_id
from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.robust import FAR
from murmuration.algorithms.schedule import Schedule
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.background import Component, Tasks
from murmuration.worker.exchange.allreduce.closing import Patience
from murmuration.worker.exchange.pairwise import round as rounds
from murmuration.worker.exchange.pairwise.partner import PairValues, PartnerStream
from murmuration.worker.exchange.pairwise.round import ANCHOR, CONTRIBUTION, PairRound
from murmuration.worker.exchange.round_context import (
    Context,
    Peers,
    Results,
    RoundConfig,
    reason_of,
)
from murmuration.worker.exchange.view import Group, View, alike
from murmuration.worker.membership.evidence import STRIKES, Waits
from murmuration.worker.training.mailbox import Begin, PrefetchedAnchor, RoundDone, RoundFailed
from murmuration.worker.transport import Stream

if TYPE_CHECKING:
    from torch import Tensor

_LEAVE_S = 1.0  # in which partners hear that a round is given up
_KEEP_ROUNDS = 2
_QUIET_S = 1.0  # several delays of a long link pass before the first byte
_TOLERANCE_S = 1e-6  # by which clocks and sums of times may differ


class Pairs(Component):
    """This peer's pair rounds. io thread only. Args: prefetched: takes the anchors' mean of a round
    to come, or that it will not come in time; tell: all members of fields of this one."""

    def __init__(
        self,
        context: Context,
        schedule: Schedule,
        peers: Peers,
        results: Results,
        prefetched: Callable[[PrefetchedAnchor], None],
        tell: Callable[..., None] = lambda **_: None,
    ) -> None:
        self.context, self.peers, self.tasks = context, peers, Tasks()
        self.values = PairValues(context)
        fragments, plan = range(len(context.elements)), context.plan
        size = self.values.total_bytes
        self.total_bytes = [[size(f, part) for part in rounds.PARTS] for f in fragments]
        self._round_bytes = [sum(sizes) for sizes in self.total_bytes]
        self._rounds = [schedule.rounds(fragment) for fragment in fragments]
        self._results, self._prefetched = results, prefetched
        self.prefetch = AnchorPrefetch(context.config, plan, self._round_bytes)
        self._patience = Patience(context.config.patience_s, plan)
        self._met: list[tuple[str, bool]] = []
        self._waits, self._tell = Waits(context.me), tell
        self._late: list[str] = []  # partners of rounds that have ended
        self._view = View()
        self._laid: dict[tuple[int, int], PairRound] = {}
        self._leaving: list[PairRound] = []  # given up, and partners are still to hear so
        self._versions: dict[int, int] = {}
        self._over: set[tuple[int, int]] = set()
        self._waiting: dict[PartnerStream, None] = {}  # until it has a place in a round
        self.changed = self._looking = self._just_laid = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    @property
    def now(self) -> float:
        return self.context.clock()

    @property
    def partners(self) -> frozenset[str]:
        laid = filter(None, map(self._laid.get, self._versions.items()))
        return frozenset(peer for each in laid for peer in each.partners)

    @property
    def busy(self) -> bool:
        return self._just_laid or any(each.running for each in self._laid.values())

    def on_view(self, view: View) -> None:
        self._view = view
        self._waits.on_members(view.members)
        for round_ in list(self._laid.values()):
            round_.view = view
            if round_.begun:
                self._hurry(round_)
                self.step(round_)
            elif round_.group != self._group(*round_.key):
                self._lay(*round_.key, round_.own)
        self.look()

    async def advanced(self, fragment: int, state: FragmentState) -> None:
        """This peer has come to a version: its anchor may go ahead to the next partner."""
        version = state.version
        if self._versions.get(fragment) == version:
            return
        self._versions[fragment] = version
        oldest = version - _KEEP_ROUNDS
        for round_ in [each for each in self._laid.values() if each.fragment == fragment]:
            if round_.round < (oldest if round_.begun else version):
                # It may have begun, where the train side has skipped it: its end must be told.
                round_.give_up("this peer has gone on")
                self.step(round_)
                if not round_.failed:  # else it leaves once the partners have heard so
                    self._leave(round_)
        self._over = {key for key in self._over if key[0] != fragment or key[1] >= oldest}
        self.changed = True
        self.look()
        if version < self._rounds[fragment]:
            await self._send_ahead(fragment, version, state.anchor)

    async def _send_ahead(self, fragment: int, round_: int, values: "Tensor") -> None:
        """A round that begins in the same instant goes first: its contribution would wait."""
        try:
            anchor = await self.values.own(fragment, ANCHOR, values)
        except Exception:  # the round itself says so; nobody may wait for what is not to be
            if self.prefetch.awaited:
                self._prefetched(PrefetchedAnchor(fragment, round_, None))
            return
        if self._versions.get(fragment) == round_:
            self._just_laid = True
            self._lay(fragment, round_, {ANCHOR: anchor})
            self.look()

            def end_instant() -> None:
                self._just_laid, self.changed = False, True
                self.look()

            asyncio.get_running_loop().call_soon(end_instant)

    async def begin(self, begin: Begin) -> None:
        key, context, anchor = (begin.fragment, begin.round), self.context, None
        try:
            own = self.values.own
            contribution = await own(begin.fragment, CONTRIBUTION, begin.values, begin.weight)
            if (laid := self._laid.get(key)) is None or laid.group != self._group(*key):
                assert begin.anchor is not None, "pairs exchange anchors"
                anchor = await own(begin.fragment, ANCHOR, begin.anchor)
        except Exception as failure:  # too large for the codec, or a defect; nobody is told of it
            self._results.finished(RoundFailed(*key, reason_of(failure), (context.me,)))
            return
        round_ = self._laid.get(key)
        if anchor is not None or round_ is None:
            assert anchor is not None, "a round that is not laid out needs the anchor"
            round_ = self._lay(*key, {ANCHOR: anchor})
        round_.own[CONTRIBUTION] = contribution
        size, lead_s = self._round_bytes[begin.fragment], self.prefetch.lead_s(begin.fragment)
        self._patience.has_quorum(*key, self.now)
        patience_s = self._patience.usual_s(0, key[1], self._members(round_))
        round_.begin(self.now, size, lead_s, patience_s)
        round_.late_at = self.now + lead_s + self._late_s(round_)
        self._hurry(round_)
        # By now all have heard what others said of the round before.
        late, self._late = self._late, []
        self._met += [(peer, self._waits.by_itself(peer)) for peer in late]
        self._met += [(peer, True) for peer in self._waits.often_late() for _ in range(STRIKES)]
        self._catch_up(round_)
        self.step(round_)
        self.changed = True
        self.look()

    def take_met(self) -> list[tuple[str, bool]]:
        """The partners of rounds that have ended since the last call, and which were late."""
        met, self._met = self._met, []
        return met

    def give_up(self, fragment: int, reason: str) -> None:
        for round_ in list(self._laid.values()):
            if round_.fragment == fragment:
                round_.give_up(reason)
                self.step(round_)
        self.look()

    async def serve(self, stream: Stream) -> None:
        caller = PartnerStream(self, stream)
        self._waiting[caller] = None
        self._set_timer()
        await caller.run()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self.tasks.close()

    def header(self, round_: PairRound, peer: str) -> pb.PairHeader:
        parts = round_.partners[peer].parts
        come = (parts[part].payload if part in parts else None for part in rounds.PARTS)
        held = [pb.Held(hash=p.hash, offset=p.received_bytes) if p else pb.Held() for p in come]
        return pb.PairHeader(
            run=self.context.run,
            fragment=round_.fragment,
            round=round_.round,
            sender=self.context.me,
            group=wire.group_hash(round_.group),
            held=held,
        )

    def admit(self, caller: PartnerStream, header: pb.PairHeader) -> None:
        """The caller may join once this peer has come to the round. Raises WireError."""
        if header.run != self.context.run:
            self._turn_away(caller, "run", "this is another run")
            return
        if header.fragment >= (fragments := len(self.context.elements)):
            raise wire.WireError(f"fragment {header.fragment} of {fragments}")
        if not self._view.live(header.sender):
            raise wire.Again(f"{header.sender or 'nobody'} is not a member")
        self._decide(caller, header)

    def forget(self, stream: PartnerStream) -> None:
        stream.over = True
        self._waiting.pop(stream, None)
        round_ = stream.round
        if round_ is not None and round_.streams.get(stream.peer) is stream:
            del round_.streams[stream.peer]

    def step(self, round_: PairRound) -> None:
        was_complete = round_.complete
        for peer in round_.decide(self.now):
            self._reach(round_, peer, round_.partners[peer].attempt)
        self.changed |= round_.complete and not was_complete
        if round_.running and self.now >= round_.late_at:
            for peer, partner in round_.partners.items():
                if not partner.met:
                    self._waits_for(round_, peer)
        if round_.ended and not round_.reported:
            round_.reported = self.changed = True
            self.prefetch.ended(round_)
            self._judge(round_)
            if round_.succeeded:
                self.tasks.spawn(self._finish(round_))
            else:
                self._fail(round_)

    def lose(self, round_: PairRound, peer: str, attempt: int, reason: str) -> None:
        """Membership probes the partner."""
        if round_.lost(peer, attempt, reason, self.now):
            # Once all of this is done: it may change the view.
            asyncio.get_running_loop().call_soon(self.peers.suspect, peer)
        self.step(round_)

    def recall(self, round_: PairRound, peer: str, attempt: int) -> None:
        round_.recalls[peer] = self.now + self.context.config.retry_s, attempt

    def look(self) -> None:
        if self._looking:
            return
        self._looking = True
        while self.changed:
            self.changed = False
            for caller in list(self._waiting):
                if caller.header is not None and caller in self._waiting:
                    self._decide(caller, caller.header)
            for round_ in [*self._laid.values(), *self._leaving]:
                for stream in list(round_.streams.values()):
                    stream.look()
        self._looking = False
        self._set_timer()

    def _decide(self, caller: PartnerStream, header: pb.PairHeader) -> None:
        key, me, peer = (header.fragment, header.round), self.context.me, header.sender
        if (round_ := self._laid.get(key)) is not None:
            expected = peer in round_.group and peer < me
            if not expected or wire.group_hash(round_.group) != header.group:
                self._turn_away(caller, "group", "this peer has another partner in that round")
                return
            del self._waiting[caller]
            if (earlier := round_.streams.get(peer)) is not None:
                earlier.drop()
            caller.round, round_.streams[peer] = round_, caller
            caller.hold(header)
        elif key in self._over or header.round < self._versions.get(header.fragment, 0):
            self._turn_away(caller, "pruned", f"round {header.round} is over here")

    def _turn_away(self, caller: PartnerStream, kind: str, reason: str) -> None:
        self.context.counts.refuse("declined")
        caller.refuse(kind, reason)
        caller.end()

    def _reach(self, round_: PairRound, peer: str, attempt: int) -> None:
        if peer not in round_.streams and peer not in round_.recalls:
            stream = PartnerStream(self, None, round_, peer, attempt)
            round_.streams[peer] = stream
            self.tasks.spawn(stream.run())

    def _group(self, fragment: int, round_: int) -> Group:
        context = self.context
        size = context.plan.group_size
        return draw_group(context.me, context.run, size, self._view, (fragment, round_))

    def _lay(self, fragment: int, number: int, own: dict[int, rounds.OwnPart]) -> PairRound:
        if (earlier := self._laid.get((fragment, number))) is not None:
            self._leave(earlier)
        context, key = self.context, (fragment, number)
        group, view = self._group(*key), self._view
        round_ = PairRound(context.me, group, key, own, self.now, view, context.config)
        self._laid[key] = round_
        for peer in round_.partners:
            if peer > context.me:
                self._reach(round_, peer, 1)
        if self.prefetch.laid(round_, self._members(round_)):
            self._prefetched(PrefetchedAnchor(*key, None))
        self.changed = True
        return round_

    def _clear(self, round_: PairRound) -> None:
        if self._laid.get(round_.key) is round_:
            del self._laid[round_.key]

    def _leave(self, round_: PairRound) -> None:
        self._clear(round_)
        round_.recalls.clear()
        for stream in list(round_.streams.values()):
            stream.drop()

    def _catch_up(self, round_: PairRound) -> None:
        for peer, partner in round_.partners.items():
            if came := CONTRIBUTION in partner.parts:
                round_.came(peer, self.now)
                self.step(round_)
            if came and peer < self.context.me and peer not in round_.streams:
                self.lose(round_, peer, 0, f"{peer}: the stream broke off")
            if partner.declined is not None:
                round_.declines(peer, partner.declined)
                self.step(round_)

    def _set_timer(self) -> None:
        now, times = self.now, [each.leave_at for each in self._leaving]
        times += (each.header_by for each in self._waiting if each.header is None)
        for round_ in self._laid.values():
            times += (at for at, _ in round_.recalls.values())
            if round_.begun:
                times.append(round_.due_at(now))
            elif (until := self.prefetch.due_at(round_)) is not None:
                times.append(until)
        at = min((at for at in times if at > now), default=math.inf)
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer_at = at
            self._timer = loop.call_later(at - now + _TOLERANCE_S, self._elapse)

    def _elapse(self) -> None:
        self._timer, self._timer_at, now = None, math.inf, self.now
        for round_ in [each for each in self._leaving if now >= each.leave_at]:
            self._leaving.remove(round_)
            self._leave(round_)
        for caller in [each for each in self._waiting if each.header is None]:
            if now >= caller.header_by:
                caller.end()
        for round_ in list(self._laid.values()):
            for peer, (at, attempt) in list(round_.recalls.items()):
                if now < at:
                    continue
                del round_.recalls[peer]
                if self._view.live(peer):
                    self._reach(round_, peer, attempt)
                else:  # it may come back
                    self.recall(round_, peer, attempt)
            self.step(round_)
            if self.prefetch.overdue(round_, now):
                self._prefetched(PrefetchedAnchor(*round_.key, None))
        self.look()

    def _members(self, round_: PairRound) -> int:
        return len(self._view.in_draw(round_.fragment) | {self.context.me})

    def _late_s(self, round_: PairRound) -> float:
        if self._members(round_) <= 2:  # of two nobody knows which is the slow one
            return self._patience.usual_s(0, round_.round, 2)
        return self._patience.habit_s(0)

    def _hurry(self, round_: PairRound) -> None:
        if any(map(self._waits.known_late, round_.partners)):
            round_.hurry()

    def _waits_for(self, round_: PairRound, peer: str) -> None:
        """Says so, once this is done: it may change the view."""
        at = round_.versions.get(peer, 0)
        reached = self._view.answers(peer) and self._view.reach(self.context.me, peer)
        if reached and self._waits.says(self.context.me, peer, at):
            tell = partial(self._tell, waited_for=peer, waited_at=at)
            asyncio.get_running_loop().call_soon(tell)

    def _judge(self, round_: PairRound) -> None:
        """Notes the partners that the round has met, and those that were late without an excuse."""
        key, now, view, patience = round_.key, self.now, self._view, self._patience
        patience.ends(*key, now)
        most_s = self._late_s(round_)
        for peer in round_.partners:
            waited_s, far = round_.waited_s(peer, now), round_.succeeded and self._far(round_, peer)
            useless = far or peer in round_.useless
            patience.waited(0, key[1], waited_s)
            if (late := waited_s > most_s - _TOLERANCE_S) or far:
                self._waits_for(round_, peer)
            met = round_.succeeded or late or useless
            if met and view.answers(peer) and view.reach(self.context.me, peer):
                if late and not useless:
                    self._late.append(peer)
                else:
                    self._met.append((peer, useless))

    def _far(self, round_: PairRound, peer: str) -> bool:
        """Tells whether a partner's values are far too large, and says so the first time."""
        parts, limit = round_.partners[peer].parts.items(), self.values.limit(round_)
        if far := any(0 < FAR * self.values.factor(round_, *each) < limit for each in parts):
            self.context.left_out(peer, "gives far larger values, clipped: compare learning rates")
        return far

    def _fail(self, round_: PairRound) -> None:
        round_.leave_at = self.now + _LEAVE_S
        self._clear(round_)
        self._over.add(round_.key)
        self._leaving.append(round_)
        self._results.finished(RoundFailed(*round_.key, round_.failed, round_.waiting_for))

    async def average_anchors(self, round_: PairRound) -> None:
        mean_anchor: Tensor | None = None
        with suppress(Exception):  # the round itself says what is wrong
            mean_anchor = await self.values.mean_anchor(round_)
        if not round_.begun:  # else it is too late
            self._prefetched(PrefetchedAnchor(*round_.key, mean_anchor))

    async def _finish(self, round_: PairRound) -> None:
        """A defect ends the round: else the train thread would wait for it in vain."""
        result: RoundDone | RoundFailed
        try:
            result = await self._averaged(round_)
        except Exception as failure:
            result = RoundFailed(*round_.key, reason_of(failure), (self.context.me,))
        self._results.finished(result)

    async def _averaged(self, round_: PairRound) -> RoundDone:
        context, own = self.context, round_.own
        mean = await self.values.mean(round_, CONTRIBUTION)
        learned = mean[: len(mean) - context.limbs(round_.fragment)]
        hashes = [part.payload.hash for part in round_.parts(CONTRIBUTION)]
        marks = dict(zip(round_.group, hashes, strict=True))
        for peers in alike(marks) if learned.any() else ():
            context.contribute_alike(peers)
        mean_anchor = await self.values.mean_anchor(round_)
        took_s = self.now - round_.began
        sent_bytes = sum(part.payload.packed_bytes for part in own.values())
        context.compression.exchanged(sent_bytes * (len(round_.group) - 1), took_s)
        return RoundDone(
            fragment=round_.fragment,
            round=round_.round,
            mean=mean,
            mean_anchor=mean_anchor,
            contributors=len(round_.group),
            next_group=(),
            missed=(),
            exchange_s=took_s,
            waited_for=round_.last,
            error=own[CONTRIBUTION].left_out,
        )


def draw_group(me: str, run: int, size: int, view: View, key: tuple[int, int]) -> Group:
    """This peer's group of a round, without those that have ended the run before; itself alone if
    it sits out. Args: key: (fragment, round)."""
    drawn = _dealt(run, key, view.in_draw(key[0]) | {me}, size, view.apart).get(me, (me,))
    return tuple(peer for peer in drawn if not view.has_ended_before(peer, *key))


@lru_cache(maxsize=64)  # asked again whenever anything has changed, and by all simulated peers
def _dealt(
    run: int, key: tuple[int, int], peers: frozenset[str], size: int, unreachable: frozenset[Pair]
) -> dict[str, Group]:
    every = groups(run, *key, membership_id(peers), peers, size, unreachable)
    return {peer: group for group in every for peer in group}


class AnchorPrefetch:
    """When the train side hears of the mean of its group's anchors before a round.

    The mean is told as soon as it is known. Without overlap the train side waits for it; it is told
    too when it may go on without. Args: round_bytes: by fragment, what a peer gives each partner.
    """

    def __init__(self, config: RoundConfig, plan: Plan, round_bytes: Sequence[int]) -> None:
        self._config, self._round_bytes = config, round_bytes
        self._told = plan.shared_momentum  # the train side uses the means
        self.awaited = self._told and plan.overlap_steps == 0
        self._met: dict[int, Group] = {}  # by fragment, with whom the last round was held
        self._s_per_byte = 0.0

    def arrived(self, size_bytes: int, took_s: float) -> None:
        """Counts slow arrivals half as much each time: the next link may be as slow."""
        if size_bytes > 0:
            self._s_per_byte = max(took_s / size_bytes, self._s_per_byte / 2)

    def lead_s(self, fragment: int) -> float:
        """How far peers may be behind that this one has not exchanged with: as long as a round
        takes, at first on the slowest link that is planned for."""
        size_bytes = self._round_bytes[fragment]
        if self._s_per_byte == 0.0:
            return self._config.transfer_s(size_bytes)
        return size_bytes * self._s_per_byte

    def laid(self, round_: PairRound, members: int) -> bool:
        """Tells whether the train side may go on alone, or where all are one group."""
        one = len(round_.group) == members and self._met.get(round_.fragment) == round_.group
        return (len(round_.group) == 1 or one) and self._goes_without(round_)

    def ended(self, round_: PairRound) -> None:
        self._met[round_.fragment] = round_.group if round_.succeeded else ()

    def came(self, round_: PairRound) -> bool:
        """Says whether the anchors' mean is to be told now that a partner's anchor is here."""
        if not self._told or round_.told or round_.begun:
            return False
        anchors = [partner.parts.get(ANCHOR) for partner in round_.partners.values()]
        round_.told = all(anchor is not None and anchor.checked for anchor in anchors)
        return round_.told

    def overdue(self, round_: PairRound, now: float) -> bool:
        """Tells whether the train side may go on by now: a silent partner is not waited for."""
        return self._awaits(round_) and now >= self._until(round_) and self._goes_without(round_)

    def due_at(self, round_: PairRound) -> float | None:
        return self._until(round_) if self._awaits(round_) else None

    def _until(self, round_: PairRound) -> float:
        quiet_s, slowest_s = _QUIET_S, self._config.transfer_s(len(round_.own[ANCHOR].payload.raw))
        if len(self._met.get(round_.fragment, round_.group)) < 2:  # the others are exchanging
            quiet_s += self.lead_s(round_.fragment)
        return min(max(round_.laid, round_.heard) + quiet_s, round_.laid + (quiet_s + slowest_s))

    def _awaits(self, round_: PairRound) -> bool:
        return self.awaited and not round_.begun and not (round_.told or round_.let_go)

    def _goes_without(self, round_: PairRound) -> bool:
        """Notes it; returns whether the train side is to hear of it."""
        if not self._awaits(round_):
            return False
        round_.let_go = True
        return True
