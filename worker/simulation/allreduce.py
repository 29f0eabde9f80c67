"""A peer's rounds of the leaderless mean, on the virtual network.

What the machines of `worker.exchange.allreduce` say is carried out here, as their I/O does it on
real streams; nothing is decided.
"""

import math
import zlib
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count

from torch import Tensor

from algorithms.codecs import codec_by_name
from algorithms.fragments import shard_bounds
from algorithms.reducers import reducer_orders
from algorithms.robust import aggregate, norm
from worker.exchange.allreduce import events
from worker.exchange.allreduce.contributor import Contributor, OwnRound
from worker.exchange.allreduce.dialogue import ContributionHeader, ReductionHeader, ShardRange
from worker.exchange.allreduce.reducer import Reducer
from worker.exchange.types import Failed, RoundTick, ShardKey, Succeeded, ViewUpdated
from worker.simulation.clock import Act
from worker.simulation.network import SimulatedStream
from worker.simulation.peer import Account, Peer
from worker.simulation.swarm import RUN, Group, SimulatedSwarm
from worker.simulation.task import Quadratic


class SimulatedLayout:
    """The `RoundLayout` of a swarm with one fragment. Args: swarm: its settings."""

    run, fragments = RUN, 1

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self._config, self._params = swarm.config, swarm.scenario.params
        self._detection_s = swarm.detection_s()
        self.codec = self.reduction_codec = codec_by_name(swarm.scenario.codec)

    def orders(self, fragment: int, group: Group) -> Sequence[Sequence[str]]:
        # One shard a peer: more of them keep a link busy, which shared links are anyway.
        return _orders(fragment, group)

    def shards(self, fragment: int, group: Group) -> Sequence[ShardRange]:
        return _ranges(self.codec.name, self._params, len(group))

    def group_hash(self, group: Group) -> int:
        return hash(group)

    def weight(self, announced: int) -> int:
        return 1

    def transfer_s(self, fragment: int) -> float:
        return self._config.transfer_s(self.codec.encoded_bytes(self._params))

    def round_s(self, fragment: int) -> float:
        payload_bytes = self.codec.encoded_bytes(self._params)
        return self._config.round_s(payload_bytes, self._detection_s)


@lru_cache(maxsize=4096)
def _orders(fragment: int, group: Group) -> tuple[tuple[str, ...], ...]:
    return reducer_orders(RUN, fragment, group)


@lru_cache(maxsize=64)
def _ranges(codec_name: str, params: int, peers: int) -> tuple[ShardRange, ...]:
    codec = codec_by_name(codec_name)
    ranges = shard_bounds(params, peers, codec.block_elements)
    sizes = [codec.encoded_bytes(stop - start) for start, stop in ranges]
    return tuple(ShardRange(*r, size, size) for r, size in zip(ranges, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class SimulatedReduction:
    """A closed shard; `mean` is of all values. `inputs` are the tries that went into it."""

    header: ReductionHeader
    mean: Tensor
    inputs: tuple[int, ...]


@dataclass(eq=False)
class _SimulatedTry:
    """One try of a contributor, `tried` in all, at a reducer. No `stream`: at itself."""

    number: int
    contributor: "MeanRounds"
    key: ShardKey
    attempt: int
    values: Tensor
    tried: int
    stream: SimulatedStream | None = None
    is_read: bool = False
    unread_bytes: int = 0
    answered: bool = False
    reduction: SimulatedReduction | None = None


class MeanRounds(Peer):
    """The rounds of one peer; a subclass does what the train thread does around them.

    Args:
        rounds: of all peers, by number.
    """

    def __init__(
        self,
        swarm: SimulatedSwarm,
        number: int,
        task: Quadratic,
        account: Account,
        rounds: "Sequence[MeanRounds]",
    ) -> None:
        super().__init__(swarm, number, task, account)
        self._rounds, self.layout = rounds, SimulatedLayout(swarm)
        self.reducer = Reducer(self.me, self.layout, swarm.config)
        self.contributor: Contributor | None = None
        self.got: dict[int, SimulatedReduction] = {}
        self._values, self._group, self.tries = self.anchor, swarm.names, 0
        self._links: dict[tuple[int, int], _SimulatedTry] = {}  # of this peer's own tries
        self._served: dict[int, _SimulatedTry] = {}
        self._own_numbers = count(-1, -1)
        self._contributions: defaultdict[ShardKey, dict[str, _SimulatedTry]] = defaultdict(dict)
        self._candidates: dict[ShardKey, SimulatedReduction] = {}
        self._reductions: dict[ShardKey, SimulatedReduction] = {}
        self._events: deque[Act] = deque()
        self._handling, self._wakes_at = False, math.inf

    @abstractmethod
    def ended(self, reason: str) -> None:
        """The own round has succeeded, with `got` by shard, or has failed for this reason."""

    def begin_round(self, round_: int, group: Group, values: Tensor) -> None:
        """Contributes these values."""
        self.tries += 1
        self._values, self._group, self.got, self._links = values, group, {}, {}
        self.contributor = Contributor(
            self.me,
            OwnRound(0, round_, group, (self.tries,) * len(group), norm=norm(values)),
            self.layout,
            self.swarm.view(self.number),
            self.swarm.config,
            self.now + self.layout.round_s(0),
        )
        self._contribute(RoundTick())

    def advanced(self, version: int, group: Group) -> None:
        """This peer's own state is at that version. The others know at once."""
        self._reduce(events.Advanced(0, version, group))
        for other in self._rounds:
            if other is not self and other.reducer.has_open:
                self.swarm.act(other.number, other.tick)

    # ------------------------------------------------------------------------- membership, streams

    def viewed(self, changed: frozenset[str]) -> None:
        view = ViewUpdated(self.swarm.view(self.number))
        self._reduce(view)
        self._contribute(view)

    def broken(self, stream: SimulatedStream) -> None:
        if stream.caller != self.number:
            self._reduce(events.ContributorGone(stream.number))
            return
        for link in [link for link in self._links.values() if link.stream is stream]:
            broken = events.TryBroken(link.key.shard, link.attempt, "a stream broke")
            self.told(link, broken)

    def offered(
        self, link: _SimulatedTry, event: events.ContributionOffered | events.OwnOffered
    ) -> None:
        """A contributor has come."""
        self._served[link.number] = link
        self._reduce(event)

    def came(self, link: _SimulatedTry, size: float) -> None:
        """This many more bytes of a contribution are here; they wait until they are taken."""
        link.unread_bytes += int(size)
        if link.is_read:
            kept, link.unread_bytes = link.unread_bytes, 0
            kept = kept if self.reducer.takes(link.number) else 0
            self._reduce(events.ContributionBytes(link.number, kept))

    def told(self, link: _SimulatedTry, event: events.ContributorEvent) -> None:
        """Something has happened to one of this peer's tries."""
        if self._links.get((link.key.shard, link.attempt)) is link:
            self._contribute(event)

    # ---------------------------------------------------------------------------------- machines

    def _contribute(self, event: events.ContributorEvent) -> None:
        self._handle(partial(self._contribute_now, self.contributor, event))

    def _contribute_now(self, machine: Contributor | None, event: events.ContributorEvent) -> None:
        if machine is not None and machine is self.contributor:
            for action in machine.handle(event, self.now):
                self.do_as_contributor(action)

    def _reduce(self, event: events.ReducerEvent) -> None:
        self._handle(partial(self._reduce_now, event))

    def _reduce_now(self, event: events.ReducerEvent) -> None:
        for action in self.reducer.handle(event, self.now):
            self.do_as_reducer(action)
        if isinstance(event, events.ContributorGone):
            self._served.pop(event.stream, None)

    def _handle(self, act: Act) -> None:
        """One event after the other, and then a tick when one may change something."""
        self._events.append(act)
        if self._handling:
            return
        self._handling = True
        while self._events:
            self._events.popleft()()
        self._handling = False
        wakes_at = self.reducer.wakes_at(self.now)
        if self.contributor is not None:
            wakes_at = min(wakes_at, self.contributor.wakes_at(self.now))
        if wakes_at < self._wakes_at:
            self._wakes_at = wakes_at
            self.at(wakes_at, self.tick)

    def tick(self) -> None:
        """Time passes."""
        self._wakes_at = math.inf
        self._reduce(RoundTick())
        self._contribute(RoundTick())

    # -------------------------------------------------------------------------- contributing side

    def do_as_contributor(self, action: events.ContributorAction) -> None:
        """Carries out what the contributor says."""
        match action:
            case events.OpenTry(peer, attempt, header):
                self._open(self._rounds[int(peer[1:])], attempt, header)
            case events.SendContribution(key, attempt, offset):
                self._send(self._links[key.shard, attempt], offset)
            case events.DecodeReduction(key, attempt):
                self._contribute(events.ReductionDecoded(key.shard, attempt))
            case events.UseReduction(key, attempt):
                reduction = self._links[key.shard, attempt].reduction
                assert reduction is not None, "a reduction is used when it is here"
                self.got[key.shard] = self._candidates[key] = reduction
                self._reduce(events.ReductionLearned(key))
            case events.EndTry(key, attempt):
                self._close(self._links.pop((key.shard, attempt)))
            case Succeeded():
                self.ended("")
            case Failed(reason):
                self.ended(reason)

    def _open(self, peer: "MeanRounds", attempt: int, header: ContributionHeader) -> None:
        link = _SimulatedTry(0, self, header.key, attempt, self._values, self.tries)
        self._links[header.key.shard, attempt] = link
        if peer is self:
            link.number = next(self._own_numbers)
            own = events.OwnOffered(
                link.number, header.key, self._group, header.hash, 1, header.norm
            )
            self.later(0.0, lambda: self.offered(link, own))
            return
        link.stream = stream = self.swarm.network.open(self.number, peer.number, attempt)
        link.number = stream.number
        offered = events.ContributionOffered(link.number, header)
        stream.send(self.number, lambda: peer.offered(link, offered))

    def _send(self, link: _SimulatedTry, offset: int) -> None:
        sent = events.ContributionSent(link.key.shard, link.attempt)
        assert link.stream is not None, "this peer sends nothing to itself"
        reducer = self._rounds[link.stream.callee]
        size = self.layout.shards(0, self._group)[link.key.shard].contribution_bytes - offset
        if not size:
            self._contribute(sent)
            return

        def arrived() -> None:
            reducer.came(link, size)
            self.swarm.act(self.number, lambda: self.told(link, sent))

        link.stream.send(self.number, arrived, size, partial(reducer.came, link))

    def _close(self, link: _SimulatedTry) -> None:
        if link.stream is None:
            self._reduce(events.ContributorGone(link.number))
        elif link.answered:
            link.stream.close()
        else:
            self.swarm.network.abort(link.stream, self.number)

    # ------------------------------------------------------------------------------ reducing side

    def do_as_reducer(self, action: events.ReducerAction) -> None:
        """Carries out what the reducer says."""
        match action:
            case events.TakeContribution(number, key, peer):
                link = self._contributions[key][peer] = self._served[number]
                link.is_read = True
                if link.unread_bytes:
                    self.came(link, 0)
            case events.VerifyContribution(number):
                self._reduce(events.ContributionVerified(number))
            case events.ComputeShard():
                self._compute(action)
            case events.KeepReduction(key):
                self._reductions[key] = self._candidates[key]
            case events.ForgetContributions(key):
                self._contributions.pop(key, None)
            case events.ForgetShard(key):
                self._contributions.pop(key, None)
                self._reductions.pop(key, None)
            case events.AnswerStream(number, key, offset):
                self._answer(self._served.pop(number), self._reductions[key], offset)
            case events.AskToResume(number, offset):
                link = self._served[number]
                resumed = events.ContributionResumed(link.key.shard, link.attempt, offset)
                self._say(link, resumed)
            case events.RedirectStream(number, peer):
                link = self._served.pop(number)
                redirected = events.ContributionRedirected(link.key.shard, link.attempt, peer)
                self._say(link, redirected, last=True)
            case events.RefuseStream(number, kind, reason):
                link = self._served.pop(number)
                refused = events.ContributionRefused(link.key.shard, link.attempt, kind, reason)
                self._say(link, refused, last=True)

    def _compute(self, action: events.ComputeShard) -> None:
        links = [self._contributions[action.key][peer] for peer in action.contributors]
        mean = aggregate((link.values for link in links), action.factors)
        header = ReductionHeader(
            contributors=action.contributors,
            next_group=action.next_group,
            codec=self.layout.codec.wire_id,
            total_bytes=action.shard.reduction_bytes,
            hash=zlib.crc32(repr(mean.tolist()).encode()),
            last=action.last,
        )
        inputs = tuple(link.tried for link in links)
        self._candidates[action.key] = SimulatedReduction(header, mean, inputs)
        self._reduce(events.ShardComputed(action.key, action.attempt))

    def _answer(self, link: _SimulatedTry, reduction: SimulatedReduction, offset: int) -> None:
        link.reduction, shard, attempt = reduction, link.key.shard, link.attempt
        header, size = reduction.header, reduction.header.total_bytes - offset
        here = link.stream is None
        begun = events.ReductionBegun(shard, attempt, header, whole=here)
        self._say(link, begun, last=here or not size)
        if link.stream is not None and size:

            def came(bytes_: float) -> None:
                link.contributor.told(link, events.ReductionBytes(shard, attempt, int(bytes_)))

            def arrived() -> None:
                link.answered = True
                came(size)

            link.stream.send(self.number, arrived, size, came)

    def _say(
        self, link: _SimulatedTry, event: events.ContributorEvent, *, last: bool = False
    ) -> None:
        def deliver() -> None:
            link.answered |= last
            link.contributor.told(link, event)

        if link.stream is None:
            self.later(0.0, deliver)
        else:
            link.stream.send(self.number, deliver)
