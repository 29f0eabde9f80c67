"""What a reducer says to each contributor: it holds, takes, redirects, refuses, and answers.

A stream begins with a header. It is held until this peer has come to that round, and then taken,
redirected to the peer that is to reduce the shard, or refused. What has been taken counts once,
however often it is sent; a broken one goes on where it was. A peer outside the round's group is
held until the shard has closed: it adds nothing. The answer goes out once the shard has closed
(`closing`), to the late ones too, and to those outside.
"""

import math
from dataclasses import dataclass

from worker.exchange.allreduce import events
from worker.exchange.allreduce.closing import (
    KEPT_ROUNDS,
    OpenShard,
    PeerContribution,
    ReducedShards,
)
from worker.exchange.allreduce.dialogue import (
    ContributionHeader,
    Group,
    RefusalKind,
    RoundLayout,
)
from worker.exchange.types import RoundConfig, RoundTick, ShardKey, ViewUpdated


@dataclass(eq=False)
class _Offer:
    """A stream of a contributor: held, until `held_until`, or else part of `shard`."""

    stream: int
    header: ContributionHeader
    own: bool
    held_until: float
    shard: OpenShard | None = None
    contribution: PeerContribution | None = None

    @property
    def waits(self) -> bool:
        """For the shard to close: all bytes are here."""
        return self.contribution is not None and self.contribution.whole


class Reducer:
    """All shards that this peer reduces.

    Args:
        me: this peer.
        layout: of rounds.
        config: closing rules.
    """

    def __init__(self, me: str, layout: RoundLayout, config: RoundConfig) -> None:
        self._me, self._layout = me, layout
        self._shards = ReducedShards(me, layout, config)
        self._offers: dict[int, _Offer] = {}

    def takes(self, stream: int) -> bool:
        """Whether a frame on this stream is to be kept: not where a later stream took over."""
        offer = self._offers.get(stream)
        return offer is not None and self._is_current(offer)

    def group(self, key: ShardKey) -> Group | None:
        """The group that lays out the round, as far as this peer knows it."""
        return self._shards.group(key)

    def awaited(self, key: ShardKey) -> tuple[str, ...]:
        """The peers that have not contributed yet to an open shard."""
        return tuple(sorted(self._shards.awaited(key)))

    @property
    def has_open(self) -> bool:
        """Whether something that this peer reduces has begun, and is not closed."""
        return self._shards.has_open

    def wakes_at(self, now: float) -> float:
        """When a tick may change something; inf while nothing is under way."""
        held = (offer.held_until for offer in self._offers.values() if offer.shard is None)
        return min((at for at in (*held, self._shards.closes_at) if at > now), default=math.inf)

    # ------------------------------------------------------------------------------------ events

    def handle(self, event: events.ReducerEvent, now: float) -> list[events.ReducerAction]:
        """Takes one event at monotonic time `now` (s) and says what to do."""
        actions: list[events.ReducerAction] = []
        match event:
            case RoundTick():
                late = [o for o in self._offers.values() if o.shard is None and now >= o.held_until]
                reason = "this peer has not closed that round in time"
                actions += (self._refuse(offer, "pruned", reason) for offer in late)
            case ViewUpdated(view):
                actions += self._shards.on_view(view)
            case events.Advanced(fragment, version, group):
                actions += self._shards.advanced(fragment, version, group)
            case events.ContributionOffered(stream, header):
                actions += self._offered(_Offer(stream, header, own=False, held_until=now))
            case events.OwnOffered(stream, key, group, hash_, weight, own_norm):
                hash_of_group = self._layout.group_hash(group)
                header = ContributionHeader(
                    run=self._layout.run,
                    fragment=key.fragment,
                    round=key.round,
                    shard=key.shard,
                    sender=self._me,
                    group=hash_of_group,
                    codec=self._layout.codec.wire_id,
                    elements=0,
                    total_bytes=0,
                    hash=hash_,
                    weight=weight,
                    norm=own_norm,
                )
                actions += self._offered(_Offer(stream, header, own=True, held_until=now))
            case events.ReductionLearned() | events.ShardComputed():
                actions += self._shards.reduced(event)
            case events.ContributorGone(stream):
                self._offers.pop(stream, None)
            case _:
                if offer := self._offers.get(event.stream):
                    actions += self._came(offer, event)
        if not isinstance(event, events.ContributionBytes | events.ContributorGone):
            actions += self._shards.close(now)
        if isinstance(
            event, ViewUpdated | events.Advanced | events.ReductionLearned | events.ShardComputed
        ):
            for offer in list(self._offers.values()):
                if offer.shard is None:
                    actions += self._decide(offer)
                elif offer.waits:
                    actions += self._answer(offer)
        return actions

    def _came(self, offer: _Offer, event: events.ReducerEvent) -> list[events.ReducerAction]:
        """Something has happened on the stream of an offer that was accepted."""
        key, sender, contribution = offer.header.key, offer.header.sender, offer.contribution
        if contribution is None or offer.shard is None:
            return []
        match event:
            case events.ContributionDamaged(_, reason, again):
                damaged = self._refuse(offer, "again" if again else "invalid", reason, faulty=True)
                if contribution.received_bytes < contribution.total_bytes:
                    return [damaged]  # what came before this frame is good
                if offer.shard.contributions.get(sender) is contribution:
                    del offer.shard.contributions[sender]
                return [damaged]
            case events.ContributorDone():
                broke_off = f"{key} from {sender} broke off"
                return [self._refuse(offer, "again", broke_off, faulty=True)]
            case _ if not self._is_current(offer):
                taken_over = f"{key} from {sender}: a later stream took over"
                return [self._refuse(offer, "again", taken_over, faulty=True)]
            case events.ContributionBytes(_, size):
                contribution.received_bytes += size
                return self._verify_if_all_is_here(offer, contribution)
            case events.ContributionVerified():
                contribution.whole = True
                if self._shards.get(key) is offer.shard:
                    offer.shard.contributed(sender)
                return self._answer(offer)
        return []

    # ------------------------------------------------------------------------------ an admission

    def _offered(self, offer: _Offer) -> list[events.ReducerAction]:
        header = offer.header
        self._offers[offer.stream] = offer
        if header.run != self._layout.run:
            return [self._refuse(offer, "run", "this is another run")]
        if header.key.fragment >= self._layout.fragments:
            reason = f"fragment {header.key.fragment} of {self._layout.fragments}"
            return [self._refuse(offer, "invalid", reason, faulty=True)]
        offer.held_until += self._layout.round_s(header.key.fragment)
        return self._decide(offer)

    def _decide(self, offer: _Offer) -> list[events.ReducerAction]:
        """Holds, takes or ends a stream that has not been accepted."""
        header = offer.header
        mine = self._shards.group(header.key)
        agreed = mine is not None and self._layout.group_hash(mine) == header.group
        decision = self._decision(offer, mine if agreed else None)
        if decision is None:
            return []
        if isinstance(decision, events.Reply):
            return [decision]
        return self._accept(offer, decision)

    def _decision(self, offer: _Offer, group: Group | None) -> events.Reply | Group | None:
        """The group to take the contribution with, what to reply, or None to hold.

        Args:
            offer: what somebody wants to contribute.
            group: the sender's if it is ours too, else None.
        """
        key = offer.header.key
        if key in self._shards.closed and group is not None:
            self._offers.pop(offer.stream, None)
            return events.AnswerStream(offer.stream, key, offer.header.reduction_offset)
        version = self._shards.version(key.fragment)
        if key not in self._shards.closed:
            if version is None or key.round > version:
                return None
            if key.round < version - KEPT_ROUNDS:
                reason = f"round {key.round} closed long ago, this peer is at {version}"
                return self._refuse(offer, "pruned", reason)
        if group is None:
            return self._refuse(offer, "group", "the groups of this round differ")
        shards = len(self._layout.orders(key.fragment, group))
        if key.shard >= shards:
            return self._refuse(offer, "invalid", f"shard {key.shard} of {shards}")
        above = self._shards.above(key, group)
        if above is not None:
            self._offers.pop(offer.stream, None)
            return events.RedirectStream(offer.stream, above)
        if version is not None and key.round < version and not self._shards.begun(key):
            # Applied here through others, and no peer that knows the answer is left.
            return self._refuse(
                offer, "pruned", f"round {key.round} is over, this peer is at {version}"
            )
        return group

    def _accept(self, offer: _Offer, group: Group) -> list[events.ReducerAction]:
        """Takes one contribution, or holds it where the round is not its sender's; counts it once
        however often it is sent.

        Other values than before come from a peer that gave the round up and tries it again later:
        the newer ones count.
        """
        header, key, sender = offer.header, offer.header.key, offer.header.sender
        try:
            if not offer.own and (early := self._misfit(header, group)):
                return [self._refuse(offer, "again", early, faulty=True)]
            weight = self._layout.weight(header.weight)
            if not 0 <= header.norm < math.inf:
                raise ValueError(f"{key} from {sender}: a norm of {header.norm}")
        except ValueError as error:
            return [self._refuse(offer, "invalid", str(error), faulty=True)]
        if not self._shards.admits(sender, group):
            return []
        entry = offer.shard = self._shards.open(key)
        earlier = entry.contributions.get(sender)
        if not offer.own and earlier is not None and earlier.hash != header.hash:
            entry.withdrawn(sender)
            earlier = None
        if earlier is not None and earlier.whole and not offer.own:
            offer.contribution = earlier
            return []
        fresh = offer.own or earlier is None or not header.resumed
        if fresh or earlier is None:
            earlier = PeerContribution(
                offer.stream, header.hash, header.total_bytes, weight, header.norm
            )
            entry.contributions[sender] = earlier
        earlier.stream, offer.contribution = offer.stream, earlier
        actions: list[events.ReducerAction] = []
        if header.resumed:
            actions.append(events.AskToResume(offer.stream, earlier.received_bytes))
        actions.append(events.TakeContribution(offer.stream, key, sender, fresh))
        if offer.own:
            earlier.whole = True
            entry.contributed(sender)
            return actions
        return actions + self._verify_if_all_is_here(offer, earlier)

    def _misfit(self, header: ContributionHeader, group: Group) -> str:
        """Why the header comes too early, if it does. Raises ValueError: it never fits."""
        key, codec = header.key, self._layout.codec
        shard = self._layout.shards(key.fragment, group)[key.shard]
        elements = shard.stop - shard.start
        announced = (header.codec, header.elements, header.total_bytes)
        if announced != (codec.wire_id, elements, shard.contribution_bytes):
            raise ValueError(
                f"{key} from {header.sender}: {header.elements} values in {header.total_bytes} "
                f"bytes of codec {header.codec}; expected {elements} in {shard.contribution_bytes} "
                f"bytes of {codec.name}"
            )
        known = self._shards.view.live(header.sender)  # gossip may not have told of it yet
        return "" if known else f"{key}: {header.sender} is not a member"

    def _verify_if_all_is_here(
        self, offer: _Offer, contribution: PeerContribution
    ) -> list[events.ReducerAction]:
        if contribution.received_bytes < contribution.total_bytes:
            return []
        key = offer.header.key
        group = self._shards.group(key)
        if group is None:
            return self._moved(offer)
        shards = self._layout.shards(key.fragment, group)
        if key.shard >= len(shards):  # the group has changed meanwhile, and with it the cut
            return self._moved(offer)
        shard = shards[key.shard]
        return [events.VerifyContribution(offer.stream, shard)]

    def _is_current(self, offer: _Offer) -> bool:
        if offer.shard is None or offer.contribution is None:
            return False
        mine = offer.shard.contributions.get(offer.header.sender) is offer.contribution
        return mine and offer.contribution.stream == offer.stream

    # -------------------------------------------------------------------------------- the answer

    def _answer(self, offer: _Offer) -> list[events.ReducerAction]:
        """What a contributor whose bytes are all here is told, if the time has come."""
        key = offer.header.key
        if key in self._shards.closed:
            self._offers.pop(offer.stream, None)
            return [events.AnswerStream(offer.stream, key, offer.header.reduction_offset)]
        return [] if self._shards.get(key) is offer.shard else self._moved(offer)

    def _moved(self, offer: _Offer) -> list[events.ReducerAction]:
        """What it has contributed counts for nothing here."""
        key = offer.header.key
        decision = self._decision(offer, self._shards.group(key))
        if isinstance(decision, events.Reply):
            return [decision]
        return [self._refuse(offer, "again", "the shard has moved to another reducer")]

    def _refuse(
        self, offer: _Offer, kind: RefusalKind, reason: str, *, faulty: bool = False
    ) -> events.RefuseStream:
        self._offers.pop(offer.stream, None)
        return events.RefuseStream(offer.stream, kind, reason, faulty)
