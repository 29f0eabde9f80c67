"""The context of both sides of an exchange: settings, sizes, counts, ways to the others."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from random import Random, SystemRandom
from typing import Protocol, TypeVar

from murmuration.algorithms import robust
from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.draws import reducer_orders
from murmuration.algorithms.plan import Plan
from murmuration.protos.events import Log, new_event
from murmuration.protos.figures import MAX_REASON, shown
from murmuration.worker import wire
from murmuration.worker.background import Offload
from murmuration.worker.exchange.measured import Arrivals, Compression
from murmuration.worker.exchange.view import ShardRange
from murmuration.worker.training.mailbox import RoundDone, RoundFailed
from murmuration.worker.transport import Stream

T = TypeVar("T")

_VALUES = 256 * 1024  # a number on which bits per value are measured: whole blocks of any codec

_IN_QUARANTINE = "is in quarantine: its contributions are far too large again and again"
_MOST_KINDS = 256  # of refusals, told apart
_MOST_NORMS = 32  # that come with a contribution
_AT_ONCE = 64 * 1024  # values: a quarter of a millisecond


class Peers(Protocol):
    """The other peers, as the I/O of rounds reaches them. io thread only."""

    def open(self, peer: str, method: str) -> Stream:
        """Raises TransportError: no address is known."""

    def suspect(self, peer: str) -> None:
        """A stream to the peer broke: membership probes it."""


class Results(Protocol):
    """The receiver of how rounds end. io thread only."""

    def finished(self, result: RoundDone | RoundFailed) -> None: ...


@dataclass
class Flow:
    """Payload of one kind in one direction, counted as it goes, sent again or not."""

    values: float = 0.0  # whose encoding has `encoded_bytes`
    encoded_bytes: int = 0
    payload_bytes: int = 0  # of these, what crossed the network, compressed and without headers

    def add(self, payload_bytes: int, encoded_bytes: int, codec: Codec) -> None:
        self.payload_bytes += payload_bytes
        self.encoded_bytes += encoded_bytes
        self.values += encoded_bytes * _VALUES / codec.encoded_bytes(_VALUES)


@dataclass
class Counts:
    """Counts what crossed the network, and events."""

    contributions_sent: Flow = field(default_factory=Flow)
    contributions_received: Flow = field(default_factory=Flow)
    reductions_sent: Flow = field(default_factory=Flow)
    reductions_received: Flow = field(default_factory=Flow)
    final_mean_sent: Flow = field(default_factory=Flow)  # contributions and reductions
    blocked_s: float = 0.0  # how long the network took none, over all streams
    late: int = 0
    takeovers: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # shards, of peers in quarantine
    against: Counter[str] = field(default_factory=Counter)  # times that a peer has pointed so
    checked_bytes: int = 0  # that were shown to others, which check means
    alike: set[tuple[str, str]] = field(default_factory=set)  # peers that contribute the same
    equal: Counter[str] = field(default_factory=Counter)  # refusals in one form of words

    @property
    def payload_sent_bytes(self) -> int:
        flows = self.contributions_sent, self.reductions_sent, self.final_mean_sent
        return sum(flow.payload_bytes for flow in flows)

    @property
    def payload_received_bytes(self) -> int:
        return self.contributions_received.payload_bytes + self.reductions_received.payload_bytes

    def refuse(self, reason: str) -> None:
        self.refused[reason] += 1


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """When a round closes, and when it is given up."""

    # Share of the awaited contributions with which a round may close without the rest.
    quorum: float = 0.5
    # How long the rest is waited for from then on, at most, on top of the time that its last
    # contributions took on their way: three times as long as rounds take, at least 5 s.
    grace_s: float = 20.0
    floor_mbps: float = 1.0  # the slowest link that is planned for, Mbit/s
    # How long a partner that has not come to a round of pairs is waited for, at most: three times
    # as long as rounds take.
    patience_s: float = 5.0
    retry_s: float = 0.25  # between two tries of one exchange
    slack_s: float = 30.0  # added to every deadline
    # A contribution whose norm is above this many times the median of the round's counts as far as
    # that, and in a small mean less far (`limit_of`); 0: no limit, and peers that point
    # against the others count too. For means of three peers or more.
    norm_limit: float = robust.NORM_LIMIT
    # Of the shards that this peer reduces: the `mean`; or of three or more the `trimmed` mean,
    # without each value's largest and smallest fifth, and without peers that point against others.
    aggregation: robust.Aggregation = "mean"

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise ValueError(f"quorum is {self.quorum}; it must be above 0, at most 1")
        for name in ("grace_s", "floor_mbps", "patience_s", "retry_s", "slack_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.norm_limit != 0 and not self.norm_limit >= 1:
            raise ValueError(
                f"norm_limit is {self.norm_limit}; it must be at least 1 (medians of the norms), "
                "or 0 for no limit"
            )
        if self.aggregation not in robust.AGGREGATIONS:
            names = ", ".join(robust.AGGREGATIONS)
            raise ValueError(f"aggregation is {self.aggregation!r}; use one of {names}")

    def transfer_s(self, payload_bytes: int) -> float:
        """Time for `payload_bytes` at the floor bandwidth."""
        return payload_bytes * 8 / (self.floor_mbps * 1e6)

    def round_s(self, payload_bytes: int, detection_s: float) -> float:
        """The deadline of a round: both directions, a dead reducer, a straggler, and slack."""
        return 2 * self.transfer_s(payload_bytes) + detection_s + self.grace_s + self.slack_s


@dataclass(frozen=True, kw_only=True)
class Context:
    """The context that the sides of all exchanges of one peer share."""

    me: str
    run: int
    elements: Sequence[int]  # of each fragment
    plan: Plan
    config: RoundConfig
    detection_s: float  # how long a dead peer takes to be noticed
    clock: Callable[[], float]  # monotonic seconds
    offload: Offload
    log: Log
    compression: Compression
    arrivals: Arrivals
    counts: Counts = field(default_factory=Counts)
    quarantine: robust.Quarantine = field(default_factory=robust.Quarantine)
    usual: robust.UsualNorms = field(default_factory=robust.UsualNorms)
    directions: robust.Directions = field(default_factory=robust.Directions)
    rng: Random = field(default_factory=SystemRandom)  # draws what is checked: nobody else may know
    most_visits: int = 1  # of a stage by one iteration's microbatches
    exact: Sequence[int] = ()  # limbs of integers, of each fragment
    ends_run: bool = False  # the mean is of the models that end a run: some may well be equal
    frame_bytes: int = 0  # of a part of a pair's round, at most; 0 for what the wire takes
    on_caught: Callable[[], None] = lambda: None  # a peer has given a false mean: shards move

    @property
    def contributions_sent(self) -> Flow:
        return self.counts.final_mean_sent if self.ends_run else self.counts.contributions_sent

    @property
    def reductions_sent(self) -> Flow:
        return self.counts.final_mean_sent if self.ends_run else self.counts.reductions_sent

    def refused(self, error: wire.WireError, sender: str, round_: int | None) -> None:
        """Counts what does not fit, and tells of equal ones the first, second, fourth time ..."""
        again, sender, equal = isinstance(error, wire.Again), shown(sender), self.counts.equal
        self.counts.refuse("again" if again else "invalid")
        words = re.sub(r"\d+", "#", f"{sender}: {shown(str(error))}")
        if words not in equal and len(equal) >= _MOST_KINDS:
            words = ""  # for all that are too many to tell apart
        equal[words] += 1
        if (times := equal[words]) & (times - 1) == 0:
            event = new_event("refused", reason=shown(str(error), MAX_REASON), again=again)
            self.log({**event, "sender": sender, "round": round_, "times": times})

    def left_out(self, peer: str, why: str = _IN_QUARANTINE) -> None:
        """Counts a contribution that does not count, and warns of a peer's first."""
        self.counts.left_out[peer] += 1
        if self.counts.left_out[peer] == 1 and peer not in self.quarantine.liars:
            self.log(new_event("warning", text=f"{peer} {why}"))

    def caught(self, peer: str, why: str) -> bool:
        """Tells of a false mean, and does without the peer. Returns whether that is news."""
        news = self.quarantine.caught(peer)
        if news:
            text = (
                f"{peer} gave a false mean: {why}; it reduces nothing for this peer from now on, "
                "and its contributions are left out"
            )
            self.log(new_event("warning", text=text))
            self.on_caught()
        return news

    def points_against(self, peer: str, cosine: float, much: bool, at: object) -> None:
        """Warns of a peer that does so, and leaves it out where that is much, and not allowed."""
        much = much and self.config.norm_limit > 0
        out = much or self.config.aggregation == "trimmed"
        self.counts.against[peer] += 1
        if self.quarantine.caught(peer) if out else self.counts.against[peer] == 1:
            counts = "is left out (see rounds.norm_limit)" if out else "counts as before"
            text = (
                f"{peer} has pointed against the others up to {at} (cosine {cosine:.2f}): its data "
                f"or labels are other than theirs, or it turns what it has learned; that {counts}"
            )
            self.log(new_event("warning", text=text))

    def known_alike(self, peers: Sequence[str]) -> bool:
        """Tells whether a warning has named all of these as peers that contribute the same."""
        told = self.counts.alike
        return len(told) >= _MOST_KINDS or told.issuperset(combinations(peers, 2))

    def contribute_alike(self, peers: Sequence[str]) -> None:
        """Warns, once of each two, that peers contribute the same, bit for bit."""
        if not self.known_alike(peers):
            self.counts.alike.update(combinations(peers, 2))
            named = f"{', '.join(peers[:-1])} and {peers[-1]}"
            text = (
                f"{named} contribute the same values: they train on the same samples; use "
                "swarm.shard(loader), or give each peer a seed of its own"
            )
            self.log(new_event("warning", text=text))

    @cached_property
    def codec(self) -> Codec:
        return codec_by_name(self.plan.codec)

    @cached_property
    def reduction_codec(self) -> Codec:
        return codec_by_name(self.plan.reduction_codec)

    async def worked(self, elements: int, work: Callable[[], T]) -> T:
        """Works on this many values by numpy and torch: off the loop, unless they are few."""
        return work() if elements <= _AT_ONCE else await self.offload(work)

    async def sent(self, stream: Stream, message: bytes) -> None:
        """Sends, and counts the time that the network took to take it. Raises TransportError."""
        began = self.clock()
        await stream.send(message)
        self.counts.blocked_s += self.clock() - began

    def weight(self, announced: int) -> int:
        """The weight of a contribution, by the inner steps announced or, for a gradient, the visits
        that it is the mean over. Raises WireError: they are more than there can be."""
        if self.plan.payload == "gradient":
            least, most, of = 0, self.most_visits, "visits; an iteration has at most"
        elif self.plan.weighting == "work":
            least, most, of = 1, self.plan.inner_steps, "inner steps; a period has"
        else:
            return 1
        if not least <= announced <= most:
            raise wire.WireError(f"a contribution of {announced} {of} {most}")
        return announced

    def work(self, announced: int) -> int:
        """The inner steps by which norms are compared: a peer's word, up to a period's."""
        return max(1, min(announced, self.plan.inner_steps))

    def limbs(self, fragment: int) -> int:
        """How many of a fragment's last values are limbs of integers."""
        return self.exact[fragment] if self.exact else 0

    def shards(self, fragment: int, group: Sequence[str]) -> tuple[ShardRange, ...]:
        return _shards(self.plan, self.elements[fragment], self.limbs(fragment), len(group))

    def norms_of(self, shards: int) -> tuple[int, ...]:
        """Which of the norms that come with a contribution is of each shard."""
        count = min(shards, _MOST_NORMS) if self.plan.compares_norms else 0
        return tuple(shard * count // shards for shard in range(shards)) if count else ()

    def leaves(self, shard: ShardRange) -> wire.Leaves:
        codecs = self.codec, self.reduction_codec
        return wire.Leaves.of(shard.stop - shard.start - shard.exact, codecs)

    def orders(self, fragment: int, group: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The peers that may reduce each shard, best first."""
        coded = self.elements[fragment] - self.limbs(fragment)
        chunks_per_peer = self.plan.chunks_per_peer(coded, len(group))
        return _orders(self.run, fragment, tuple(group), chunks_per_peer)

    def transfer_s(self, fragment: int) -> float:
        """How long the fragment takes on the slowest link that is planned for."""
        return self.config.transfer_s(self.contribution_bytes(fragment))

    def round_s(self, fragment: int) -> float:
        return self.config.round_s(self.contribution_bytes(fragment), self.detection_s)

    def contribution_bytes(self, fragment: int) -> int:
        return wire.encoded_bytes(self.codec, self.elements[fragment], self.limbs(fragment))


_orders = lru_cache(maxsize=256)(reducer_orders)  # every offer of a shard asks


@lru_cache(maxsize=256)
def _shards(plan: Plan, elements: int, exact: int, peers: int) -> tuple[ShardRange, ...]:
    codecs = codec_by_name(plan.codec), codec_by_name(plan.reduction_codec)
    found = []
    for start, stop in plan.shard_bounds(elements, peers, exact):
        limbs = exact if stop == elements else 0
        up, down = (wire.encoded_bytes(codec, stop - start, limbs) for codec in codecs)
        found.append(ShardRange(start, stop, up, down, limbs))
    return tuple(found)


def reason_of(failure: Exception) -> str:
    """Why a round has come to nothing; the kind of what is no word of a codec's or a peer's."""
    known = isinstance(failure, ValueError)
    return str(failure) if known else f"{type(failure).__name__}: {failure}"
