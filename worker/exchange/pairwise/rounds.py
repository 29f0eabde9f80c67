"""All pair rounds of one peer: the whole dialogue, decided without I/O, clock or tensors.

A buffer is laid out for a round as soon as its group can be known, and the anchor goes ahead on its
streams while no round is on its way. `begin` adds the contribution and starts the round's machine
(`worker.exchange.pairwise.round`). A round that is over stays laid out for two more, so that
partners that missed the last word can hear it again.

What carries the messages (`worker.exchange.pairwise.io` live, `worker.simulation.pairs` on a
virtual network) reports what happens and carries the actions out in their order.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

from algorithms.pairing import groups, membership_epoch
from algorithms.reducers import Pair
from worker.exchange.pairwise.dialogue import PairDialogue
from worker.exchange.pairwise.prefetch import AnchorPrefetch
from worker.exchange.pairwise.round import (
    CallPartner,
    Event,
    PairRound,
    PartnerCame,
    PartnerComplete,
    PartnerDeclined,
    PartnerLost,
    StageRound,
)
from worker.exchange.pairwise.stream import (
    ANCHOR,
    CONTRIBUTION,
    Action,
    AverageAnchors,
    Group,
    PairBuffer,
    PairPart,
    PairSettings,
    RoundEnded,
    TellAnchor,
)
from worker.exchange.types import Failed, GivenUp, RoundTick, Succeeded, Suspect, View, ViewUpdated

_LEAVE_S = 1.0  # in which partners hear that a round is given up
_KEEP_ROUNDS = 2


class PairRounds(PairDialogue):
    """Args: settings: of the run. Times are monotonic seconds."""

    def __init__(self, settings: PairSettings) -> None:
        super().__init__(settings)
        self._round_bytes = [sum(form.total_bytes for form in forms) for forms in settings.forms]
        self._prefetch = AnchorPrefetch(
            settings.config,
            self._skew,
            self._round_bytes,
            told=settings.anchors_told,
            awaited=settings.anchors_awaited,
        )

    @property
    def partners(self) -> frozenset[str]:
        """With whom this peer is to hold the rounds that it has come to."""
        buffers = filter(None, map(self._buffers.get, self._versions.items()))
        return frozenset(peer for each in buffers for peer in each.group) - {self._me}

    def group(self, fragment: int, round_: int) -> Group:
        """This peer's group of the round; itself alone if it sits out."""
        return draw_group(self._settings, self._view, fragment, round_)

    def is_laid(self, fragment: int, round_: int) -> bool:
        """Whether there is a buffer for the round, in the group that it has now."""
        buffer = self._buffers.get((fragment, round_))
        return buffer is not None and buffer.group == self.group(fragment, round_)

    @property
    def timer_at(self) -> float:
        """When `elapse` has something to do; infinite if it has not."""
        times = [each.leave_at for each in self._leaving if each.leave_at is not None]
        times += (at for each in self._buffers.values() for at, _ in each.recalls.values())
        return min(times, default=math.inf)

    def due_at(self, now: float) -> float:
        """When a tick may change something next, after `now`; infinite if time alone does not."""
        times = [self.timer_at, *(stream.header_by for stream in self._headless)]
        for buffer in self._buffers.values():
            if buffer.machine is not None:
                times.append(buffer.machine.due_at(now))
            elif (until := self._prefetch.due_at(buffer)) is not None:
                times.append(until)
        return min((time_s for time_s in times if time_s > now), default=math.inf)

    # -------------------------------------------------------------------------- what happens here

    def tick(self, now: float) -> list[Action]:
        """Time passes."""
        self._elapse(now)
        for stream in [each for each in self._headless if now >= each.header_by]:
            self._end(stream)
        for buffer in list(self._buffers.values()):
            self._step(buffer, RoundTick())
            if self._prefetch.overdue(buffer, now):
                self._tell(buffer)
        return self._flush()

    def elapse(self, now: float) -> list[Action]:
        """Does what has been put off until now: see `timer_at`."""
        self._elapse(now)
        return self._flush()

    def on_view(self, view: View, now: float) -> list[Action]:
        """Membership has changed."""
        self._view, self._now = view, now
        for buffer in list(self._buffers.values()):
            if buffer.machine is not None:
                self._step(buffer, ViewUpdated(view))
            elif buffer.group != self.group(*buffer.key):
                self._lay(buffer.fragment, buffer.round, buffer.own)
        return self._flush()

    def advanced(self, fragment: int, version: int, now: float) -> list[Action]:
        """This peer has come to a version. Where `wants_anchor` said so before, `lay` follows."""
        self._now = now
        if self._versions.get(fragment) == version:
            return []
        self._versions[fragment] = version
        oldest = version - _KEEP_ROUNDS
        for buffer in [each for each in self._buffers.values() if each.fragment == fragment]:
            if buffer.round < (version if buffer.machine is None else oldest):
                # It may have begun, where the train side has skipped it: its end must be told.
                self._step(buffer, GivenUp("this peer has gone on"))
                if not buffer.failed:  # else it leaves once the partners have heard so
                    self._leave(buffer)
        self._over = {key for key in self._over if key[0] != fragment or key[1] >= oldest}
        self._changed = True
        return self._flush()

    def wants_anchor(self, fragment: int, version: int) -> bool:
        """Whether the anchor of a version may go ahead to its round's partners: once, if it may."""
        news = self._versions.get(fragment) != version
        return news and version < self._settings.rounds[fragment]

    def lay(self, fragment: int, round_: int, anchor: PairPart, now: float) -> list[Action]:
        """The anchor for a round to come is there, unless this peer has gone on meanwhile. It goes
        ahead with the next `poll`: a round that begins in the same instant comes first."""
        self._now = now
        if self._versions.get(fragment) == round_:
            self._lay(fragment, round_, {ANCHOR: anchor})
            self._just_laid = True
        return self._flush()

    def poll(self, now: float) -> list[Action]:
        """Nothing else happens in the instant of a `lay`."""
        self._now, self._just_laid, self._changed = now, False, True
        return self._flush()

    def cannot_lay(self, fragment: int, round_: int) -> list[Action]:
        """There is no anchor for a round to come: nobody may wait for what is not to be."""
        return [TellAnchor(fragment, round_, None)] if self._prefetch.awaited else []

    def begin(
        self,
        key: tuple[int, int],
        contribution: PairPart,
        anchor: PairPart | None,
        now: float,
    ) -> list[Action]:
        """Starts a round; it ends with `RoundEnded`.

        Args:
            key: (fragment, round).
            anchor: only where the round is not laid out yet.
        """
        self._now, buffer = now, self._buffers.get(key)
        if anchor is not None or buffer is None:
            assert anchor is not None, "a round that is not laid out needs the anchor"
            buffer = self._lay(*key, {ANCHOR: anchor})
        buffer.own[CONTRIBUTION], buffer.began = contribution, now
        size = self._round_bytes[buffer.fragment]
        buffer.machine = PairRound(
            self._me,
            buffer.group,
            self._view,
            self._config,
            key=key,
            began_at=now,
            payload_bytes=size,
            lead_s=self._skew.lead_s(size),
        )
        for event in self._seen(buffer):
            self._step(buffer, event)
        self._step(buffer, RoundTick())
        self._changed = True
        return self._flush()

    def give_up(self, fragment: int, reason: str, now: float) -> list[Action]:
        """Ends the fragment's round on its way, if there is one, as failed."""
        self._now = now
        for buffer in list(self._buffers.values()):
            if buffer.fragment == fragment:
                self._step(buffer, GivenUp(reason))
        return self._flush()

    def anchors_averaged(self, buffer: PairBuffer, mean_anchor: object) -> list[Action]:
        """The mean that `AverageAnchors` asked for."""
        if buffer.machine is not None:  # too late
            return []
        return [TellAnchor(buffer.fragment, buffer.round, mean_anchor)]

    # -------------------------------------------------------------------------------- the buffers

    def _lay(self, fragment: int, round_: int, own: dict[int, PairPart]) -> PairBuffer:
        """A buffer for the round in place of an earlier one. Those partners are called that this
        peer calls."""
        if (earlier := self._buffers.get((fragment, round_))) is not None:
            self._leave(earlier)
        buffer = PairBuffer(fragment, round_, self.group(fragment, round_), dict(own), self._now)
        self._buffers[buffer.key] = buffer
        for peer in buffer.group:
            if peer > self._me:
                self._reach(buffer, peer, 1)
        if self._prefetch.laid(buffer, len(drawn_from(self._view, self._me, fragment))):
            self._tell(buffer)
        self._changed = True
        return buffer

    def _seen(self, buffer: PairBuffer) -> Iterable[Event]:
        """What has happened before the round had begun here."""
        for peer in buffer.group:
            came = CONTRIBUTION in buffer.theirs[peer]
            if came:
                yield PartnerCame(peer)
            if buffer.received(peer):
                yield PartnerComplete(peer)
            if came and peer < self._me and peer not in buffer.streams:
                yield PartnerLost(peer, 0, f"{peer}: the stream broke off")
            if peer in buffer.declined:
                yield PartnerDeclined(peer, buffer.declined[peer])

    def _step(self, buffer: PairBuffer, event: Event) -> None:
        """Feeds the round's machine, if it has begun, and does what that says."""
        if buffer.machine is None or buffer.ended:
            return
        for action in buffer.machine.step(event, self._now):
            match action:
                case CallPartner(peer, attempt):
                    self._reach(buffer, peer, attempt)
                case StageRound():
                    buffer.complete = self._changed = True
                case Suspect():
                    self._do(action)
                case Succeeded():
                    buffer.succeeded = buffer.complete = self._changed = True
                    self._prefetch.ended(buffer)
                    self._do(RoundEnded(buffer, action))
                case Failed(reason):
                    buffer.failed, self._changed = reason, True
                    self._prefetch.ended(buffer)
                    self._clear(buffer)
                    self._over.add(buffer.key)
                    buffer.leave_at = self._now + _LEAVE_S
                    self._leaving.append(buffer)
                    self._do(RoundEnded(buffer, action))

    def _anchor_came(self, buffer: PairBuffer) -> None:
        if self._prefetch.came(buffer, self._me):
            self._do(AverageAnchors(buffer))

    def _tell(self, buffer: PairBuffer) -> None:
        self._do(TellAnchor(buffer.fragment, buffer.round, None))

    def _elapse(self, now: float) -> None:
        self._now = now
        due = [b for b in self._leaving if b.leave_at is not None and now >= b.leave_at]
        for buffer in due:
            self._leave(buffer)
        self._leaving = [buffer for buffer in self._leaving if buffer not in due]
        for buffer in self._buffers.values():
            for peer, (at, attempt) in list(buffer.recalls.items()):
                if now < at:
                    continue
                del buffer.recalls[peer]
                if self._view.live(peer):
                    self._reach(buffer, peer, attempt)
                else:  # it may come back
                    buffer.recalls[peer] = now + self._config.retry_s, attempt

    def _clear(self, buffer: PairBuffer) -> None:
        if self._buffers.get(buffer.key) is buffer:
            del self._buffers[buffer.key]

    def _leave(self, buffer: PairBuffer) -> None:
        self._clear(buffer)
        buffer.recalls.clear()
        for stream in list(buffer.streams.values()):
            self._drop(stream)


# -------------------------------------------------------------------------------------- draws


def drawn_from(view: View, me: str, fragment: int) -> frozenset[str]:
    """Whom the groups of the fragment's rounds are drawn from."""
    peers = view.in_draw(fragment)
    return peers if me in peers else peers | {me}


def draw_group(settings: PairSettings, view: View, fragment: int, round_: int) -> Group:
    """This peer's group of the round; itself alone if it sits out. A peer that comes so late that
    others of its group have ended the run does without those."""
    me, peers = settings.me, drawn_from(view, settings.me, fragment)
    dealt = _dealt(settings.run, fragment, round_, peers, settings.group_size, view.unreachable)
    drawn = dealt.get(me, (me,))
    return tuple(peer for peer in drawn if not view.has_ended_before(peer, fragment, round_))


@lru_cache(maxsize=64)  # asked again whenever anything has changed, and by all simulated peers
def _dealt(
    run: int,
    fragment: int,
    round_: int,
    peers: frozenset[str],
    size: int,
    unreachable: frozenset[Pair],
) -> dict[str, Group]:
    epoch = membership_epoch(peers)
    every = groups(run, fragment, round_, epoch, peers, size, unreachable)
    return {peer: group for group in every for peer in group}
