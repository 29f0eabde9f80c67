"""One of this peer's own rounds: every shard to its reducer, and every reduction back.

A shard goes to the first usable peer in its rendezvous order that everybody reaches. A broken
stream is tried again at the same peer, resuming where it was. If membership suspects that peer, or
knows that the link to it is cut, the next takes over. The shards for one peer go one after another:
the first come back while others go. The round succeeds when all shards are reduced. It fails as a
whole at its deadline, or when a reducer says that it cannot succeed. The machine ends by emitting
`Succeeded` or `Failed` once.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from algorithms.counted import Part
from worker.exchange.allreduce import events
from worker.exchange.allreduce.dialogue import (
    ContributionHeader,
    Group,
    ReductionHeader,
    RoundLayout,
)
from worker.exchange.types import (
    Failed,
    GivenUp,
    RoundConfig,
    RoundTick,
    ShardKey,
    Succeeded,
    Suspect,
    View,
    ViewUpdated,
)


@dataclass(frozen=True)
class OwnRound:
    """What this peer contributes; `hashes` are those of its encoded shards."""

    fragment: int
    round: int
    group: Group
    hashes: tuple[int, ...]
    weight: int = 1
    norm: float = 0.0


@dataclass
class _Part:
    """One shard on its way; `came_bytes` are of the reduction whose hash is `came_of`."""

    target: str = ""
    attempt: int = 0
    open: bool = False
    asked: bool = False  # for frames: they go out, or wait for their turn
    offset: int = 0
    receiving: ReductionHeader | None = None
    reduction: ReductionHeader | None = None
    came_of: int | None = None
    came_bytes: int = 0
    retry_at: float = 0.0
    last_reason: str = ""
    tried: str = ""


class Contributor:
    """One round of one fragment at this peer.

    Args:
        me, own: this peer, and what it contributes.
        layout: of rounds.
        deadline: monotonic time (s) at which the round is given up.
    """

    def __init__(
        self,
        me: str,
        own: OwnRound,
        layout: RoundLayout,
        view: View,
        config: RoundConfig,
        deadline: float,
    ) -> None:
        self._me, self._own, self._layout = me, own, layout
        self._view, self._config, self._deadline = view, config, deadline
        self.fragment, self.round = own.fragment, own.round
        self._orders = layout.orders(own.fragment, own.group)
        self._ranges = layout.shards(own.fragment, own.group)
        self._parts = [_Part() for _ in self._orders]
        self._lanes: defaultdict[str, list[int]] = defaultdict(list)
        self._slowest = ""
        self._ended = False

    # -------------------------------------------------------------------- what the round came to

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The reducers whose answer is missing."""
        return tuple(sorted({p.target for p in self._parts if p.reduction is None and p.target}))

    @property
    def waits_here(self) -> tuple[ShardKey, ...]:
        """The shards that this peer reduces itself, and that it has not closed."""
        return tuple(
            self._key(shard)
            for shard, part in enumerate(self._parts)
            if part.reduction is None and part.target == self._me
        )

    @property
    def contributors(self) -> int:
        """The fewest in any shard's mean."""
        return min(len(each.contributors) for each in self._reductions())

    @property
    def next_group(self) -> Group:
        return self._reductions()[0].next_group

    @property
    def missed(self) -> tuple[tuple[int, int], ...]:
        """The ranges whose reduction does not have this peer in it."""
        return self._where(counted=False)

    @property
    def counted(self) -> tuple[tuple[int, int], ...]:
        """The ranges whose reduction is here and has this peer in it."""
        return self._where(counted=True)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The contributors of each shard's mean, by its range."""
        pairs = zip(self._ranges, self._reductions(), strict=True)
        return tuple((*range_.bounds, each.contributors) for range_, each in pairs)

    @property
    def waited_for(self) -> str:
        """The late peer: the last to contribute to every shard, or else the last to answer."""
        late = {each.last for each in self._reductions()}
        return late.pop() if len(late) == 1 else self._slowest

    def wakes_at(self, now: float) -> float:
        """When a tick may change something; inf once the round has ended."""
        if self._ended:
            return math.inf
        retries = (p.retry_at for p in self._parts if p.reduction is None and not p.open)
        return min((self._deadline, *(at for at in retries if at > now)))

    def receives(self, shard: int, attempt: int) -> bool:
        """Whether frames of a reduction are expected on this try."""
        part = self._current(shard, attempt)
        return part is not None and part.receiving is not None

    # ------------------------------------------------------------------------------------ events

    def handle(self, event: events.ContributorEvent, now: float) -> list[events.ContributorAction]:
        """Takes one event at monotonic time `now` (s) and says what to do."""
        if self._ended:
            return []
        actions: list[events.ContributorAction] = []
        match event:
            case RoundTick():
                pass
            case ViewUpdated(view):
                self._view = view
            case GivenUp(reason):
                return self._fail(reason)
            case events.ContributionRefused(shard, attempt, kind, reason) if kind != "again":
                if part := self._current(shard, attempt):
                    return self._fail(self._said(part, reason))
            case _:
                part = self._current(event.shard, event.attempt)
                if part is None:
                    return []
                actions += self._answered(event.shard, part, event, now)
        actions += self._advance(now)
        if all(part.reduction is not None for part in self._parts):
            self._ended = True
            actions.append(Succeeded())
        elif now >= self._deadline:
            reasons = {p.last_reason for p in self._parts if p.reduction is None and p.last_reason}
            actions += self._fail("; ".join(["the round's deadline has passed", *sorted(reasons)]))
        return actions

    def _answered(
        self, shard: int, part: _Part, event: events.ContributorEvent, now: float
    ) -> list[events.ContributorAction]:
        """Something has happened to a try that is on its way."""
        match event:
            case events.ContributionResumed(offset=offset):
                if part.asked or part.target == self._me:
                    return self._damaged(
                        shard, part, f"{self._key(shard)}: an unexpected resume", now
                    )
                return self._queue(shard, min(offset, self._ranges[shard].contribution_bytes))
            case events.ContributionSent():
                return self._leave_lane(shard, part)
            case events.ContributionRedirected(peer=peer):
                part.last_reason = f"{part.target} leaves it to {peer}"
                # Our own view decides; where it agrees, go there at once.
                best = self._best(shard)
                part.retry_at = now if best == peer else now + self._config.retry_s
                return self._end(shard, part)
            case events.ContributionRefused(reason=reason):
                return self._break(shard, part, reason, now)
            case events.ReductionBegun(header=header, whole=whole):
                return self._begun(shard, part, header, whole, now)
            case events.ReductionBytes(size=size) if part.receiving is not None:
                part.came_bytes += size
                return self._decode_if_whole(shard, part)
            case events.ReductionDecoded() if part.receiving is not None:
                part.reduction, self._slowest = part.receiving, part.target
                use = events.UseReduction(self._key(shard), part.attempt)
                return [use, *self._end(shard, part)]
            case events.AnswerDamaged(reason=reason):
                return self._damaged(shard, part, reason, now)
            case events.TryBroken(reason=reason):
                broke_off = "ended without an answer"
                if part.receiving is not None:
                    broke_off = f"{self._key(shard)}: the reduction broke off"
                suspect = Suspect(part.target)
                return [*self._break(shard, part, reason or broke_off, now), suspect]
        return []

    # ------------------------------------------------------------------------------- the answer

    def _begun(
        self, shard: int, part: _Part, header: ReductionHeader, whole: bool, now: float
    ) -> list[events.ContributorAction]:
        key, codec = self._key(shard), self._layout.reduction_codec
        expected = self._ranges[shard].reduction_bytes
        if header.codec != codec.wire_id or header.total_bytes != expected:
            wrong = (
                f"{key}: a reduction of {header.total_bytes} bytes in codec {header.codec}, "
                f"expected {expected} in {codec.name}"
            )
            return self._damaged(shard, part, wrong, now)
        if header.last and header.last not in header.contributors:
            wrong = f"{key}: {header.last!r} came last, but is no contributor"
            return self._damaged(shard, part, wrong, now)
        fresh = part.came_of is None
        if part.came_of not in (None, header.hash):
            return self._damaged(
                shard, part, f"{key}: the reduction is another one than before", now
            )
        part.receiving, part.came_of = header, header.hash
        if whole:
            part.came_bytes = expected
        receive = events.ReceiveReduction(key, part.attempt, header, fresh)
        return [receive, *self._decode_if_whole(shard, part)]

    def _decode_if_whole(self, shard: int, part: _Part) -> list[events.ContributorAction]:
        if part.came_bytes < self._ranges[shard].reduction_bytes:
            return []
        return [events.DecodeReduction(self._key(shard), part.attempt)]

    # ------------------------------------------------------------------------- the end of a try

    def _damaged(
        self, shard: int, part: _Part, reason: str, now: float
    ) -> list[events.ContributorAction]:
        """Nothing that came is to be used."""
        part.came_of, part.came_bytes = None, 0
        return self._break(shard, part, reason, now)

    def _break(
        self, shard: int, part: _Part, reason: str, now: float
    ) -> list[events.ContributorAction]:
        """Another try may succeed."""
        part.last_reason = self._said(part, reason)
        part.retry_at = now + self._config.retry_s
        return self._end(shard, part)

    def _end(
        self, shard: int, part: _Part, *, taken_over: bool = False
    ) -> list[events.ContributorAction]:
        part.open, part.receiving = False, None
        ended = events.EndTry(self._key(shard), part.attempt, taken_over)
        return [ended, *self._leave_lane(shard, part)]

    def _fail(self, reason: str) -> list[events.ContributorAction]:
        self._ended = True
        failed = Failed(reason, self.waiting_for)
        actions: list[events.ContributorAction] = [
            events.EndTry(self._key(shard), part.attempt)
            for shard, part in enumerate(self._parts)
            if part.open
        ]
        return [*actions, failed]

    # ------------------------------------------------------------------------------- the way out

    def _queue(self, shard: int, offset: int) -> list[events.ContributorAction]:
        """The frames go out when those before them to the same peer have."""
        part = self._parts[shard]
        part.asked, part.offset = True, offset
        lane = self._lanes[part.target]
        lane.append(shard)
        return [self._send(shard)] if lane[0] == shard else []

    def _leave_lane(self, shard: int, part: _Part) -> list[events.ContributorAction]:
        lane = self._lanes[part.target]
        if shard not in lane:
            return []
        first = lane[0] == shard
        lane.remove(shard)
        return [self._send(lane[0])] if first and lane else []

    def _send(self, shard: int) -> events.SendContribution:
        part = self._parts[shard]
        return events.SendContribution(self._key(shard), part.attempt, part.offset)

    def _advance(self, now: float) -> list[events.ContributorAction]:
        """Moves what its reducer will not answer, and begins what is due."""
        actions: list[events.ContributorAction] = []
        for shard, part in enumerate(self._parts):
            if part.reduction is not None or (part.open and not self._lost(part.target)):
                continue
            best = self._best(shard)
            if part.open and best != part.target:
                actions += self._end(shard, part, taken_over=True)
                part.retry_at = now
            if part.open or best is None or now < part.retry_at:
                continue
            actions += self._open(shard, part, best)
        return actions

    def _open(self, shard: int, part: _Part, peer: str) -> list[events.ContributorAction]:
        resumed, part.tried = part.tried == peer, peer
        if not resumed:
            part.came_of, part.came_bytes = None, 0
        part.target, part.open, part.asked = peer, True, False
        part.attempt += 1
        own, range_ = self._own, self._ranges[shard]
        header = ContributionHeader(
            run=self._layout.run,
            fragment=self.fragment,
            round=self.round,
            shard=shard,
            sender=self._me,
            group=self._layout.group_hash(own.group),
            codec=self._layout.codec.wire_id,
            elements=range_.stop - range_.start,
            total_bytes=range_.contribution_bytes,
            hash=own.hashes[shard],
            weight=own.weight,
            norm=own.norm,
            reduction_offset=part.came_bytes,
            resumed=resumed,
        )
        opened: list[events.ContributorAction] = [events.OpenTry(peer, part.attempt, header)]
        sends = not resumed and peer != self._me
        return opened + (self._queue(shard, 0) if sends else [])

    # --------------------------------------------------------------------------------- inside

    def _current(self, shard: int, attempt: int) -> _Part | None:
        part = self._parts[shard]
        return part if part.open and part.attempt == attempt else None

    def _best(self, shard: int) -> str | None:
        return self._view.reducer(self._orders[shard])

    def _lost(self, peer: str) -> bool:
        """Whether a stream to the peer is not worth waiting for. That somebody else does not reach
        it is no reason: what has been sent there counts."""
        return not (self._view.usable(peer) and self._view.reach(self._me, peer))

    def _key(self, shard: int) -> ShardKey:
        return ShardKey(self.fragment, self.round, shard)

    def _said(self, part: _Part, reason: str) -> str:
        return reason if part.target == self._me else f"{part.target}: {reason}"

    def _reductions(self) -> list[ReductionHeader]:
        return [part.reduction for part in self._parts if part.reduction is not None]

    def _where(self, *, counted: bool) -> tuple[tuple[int, int], ...]:
        return tuple(
            range_.bounds
            for range_, part in zip(self._ranges, self._parts, strict=True)
            if part.reduction is not None and (self._me in part.reduction.contributors) is counted
        )
