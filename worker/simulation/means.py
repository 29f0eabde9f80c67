"""A simulated peer's rounds of the leaderless mean: the live code, and the train side around it. A
contribution holds the task's 8 values once for each shard; only on the links does it count more."""

import zlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.diloco import pseudo_gradient
from murmuration.algorithms.draws import reducer_orders
from murmuration.algorithms.fragment_state import FragmentOptimizer, FragmentState, RoundResult
from murmuration.algorithms.fragments import Ranges
from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.catchup.choices import choose_repair
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import Group, ShardRange
from murmuration.worker.membership import Digest, Phase
from murmuration.worker.simulation.network import SimulatedStream, Sizes, frame_sizes
from murmuration.worker.simulation.peer import VALUES, Account, Peer
from murmuration.worker.simulation.simulated_swarm import RUN, SimulatedSwarm
from murmuration.worker.simulation.virtual_loop import Act
from murmuration.worker.training.mailbox import Begin, RoundDone, RoundFailed
from murmuration.worker.transport import Stream

_TICK_S = 0.05  # as the live node's
_SHARD_BYTES = 4 * VALUES
_REPAIR_S = 1.0  # between two tries to find somebody to take the state from
_orders = lru_cache(maxsize=4096)(reducer_orders)


@lru_cache(maxsize=256)
def _ranges(peers: int) -> tuple[ShardRange, ...]:
    size = _SHARD_BYTES
    return tuple(ShardRange(k * VALUES, (k + 1) * VALUES, size, size) for k in range(peers))


class SimulatedContext(Context):
    """A context of one fragment, in which every shard holds all values of the task."""

    def shards(self, fragment: int, group: Sequence[str]) -> tuple[ShardRange, ...]:
        return _ranges(len(group))

    def orders(self, fragment: int, group: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        # One shard a peer: more of them keep a link busy, which shared links are anyway.
        return _orders(RUN, fragment, tuple(group))


class MeanPeer(Peer):
    """One replica of `diloco`."""

    def __init__(self, swarm: SimulatedSwarm, number: int, account: Account) -> None:
        super().__init__(swarm, number, account)
        self.codec = codec_by_name(swarm.scenario.codec)
        self._payload_bytes = self.codec.encoded_bytes(swarm.scenario.params)
        elements = self._payload_bytes // 4  # of fp32: as the modelled bytes ask for
        self.context = SimulatedContext(
            elements=[elements], plan=PRESETS["diloco"], config=swarm.config, **self.surroundings()
        )
        self.reducer = Reducer(self.context)
        self.contributor = Contributor(self.context, self.reducer, self, self)
        self._group = swarm.names
        self._in_round = self._ticking = False
        self.version = 0
        plan = replace(PRESETS["diloco"], merge=swarm.scenario.merge)
        state = FragmentState(0, 0, self._group, self.anchor, self.momentum, 0)
        self.optimizer = FragmentOptimizer(plan, state, _state_hash)
        self._error: Tensor | None = None  # that the encoding of the contribution has left out
        self._sent: Tensor | None = None  # and what others have decoded of it
        self._fetching: tuple[SimulatedStream, Act] | None = None

    def start(self) -> None:
        self.viewed()
        self.advanced(0, self._group)
        self.compute()

    def broken(self, stream: SimulatedStream) -> None:
        if self._fetching is not None and self._fetching[0] is stream:
            then, self._fetching = self._fetching[1], None
            self.later(_REPAIR_S, then)
        else:
            super().broken(stream)

    def begin(self) -> None:
        if self._repair(self.begin):
            return
        g = pseudo_gradient(self.anchor, self.local)
        values = self.optimizer.contribute(g, self.version).values
        if self.swarm.scenario.merge == "keep":
            self._sent = self.codec.decode(self.codec.encode(values), VALUES)
            values, self._error = self._sent, values - self._sent
        self.begin_round(self.version, self._group, values)

    def ended(self, result: RoundDone | RoundFailed) -> None:
        waited_s = self.waited()
        self.account.rounds += 1
        shards = [k * len(self._group) // VALUES for k in range(VALUES)]  # that each value is of
        if isinstance(result, RoundFailed):
            self.account.failed(result.reason)
            here = {start // VALUES for start, _ in result.counted}
            counted = _where(shard in here for shard in shards)
            self.optimizer.abandon(counted, self._error, self.local)
            self.later(_REPAIR_S, self._after_failure)
            return
        self.account.syncs_s.append(waited_s)
        contributors = [result.parts[shard][2] for shard in shards]
        own = RoundResult(
            round=result.round,
            mean=torch.stack([result.mean[s * VALUES + k] for k, s in enumerate(shards)]),
            contributors=result.contributors,
            next_group=result.next_group,
            missed=_where(self.me not in peers for peers in contributors),
            error=self._error,
            parts=tuple((k, k + 1, peers) for k, peers in enumerate(contributors)),
            sent=None if self._sent is None else partial(torch.clone, self._sent),
        )
        self.local = self.optimizer.apply(own, self.local)
        self.commit()
        self._go_on()

    def _after_failure(self) -> None:
        if not self._repair(self._go_on):
            self._go_on()

    def _go_on(self) -> None:
        self.waited()
        if self.version < self.swarm.scenario.rounds:
            self.compute()
        elif not self.done:
            self.finish()

    @property
    def _digest(self) -> Digest:
        state = self.optimizer.state
        return Digest(state.version, state.contributors, state.hash)

    def commit(self) -> None:
        state = self.optimizer.state
        self.anchor, self.momentum = state.anchor, state.momentum
        self.version, self._group = state.version, state.group
        phase = Phase.DONE if state.version >= self.swarm.scenario.rounds else Phase.TRAINING
        self.swarm.advanced(self.number, self._digest, phase)
        self.advanced(state.version, state.group)

    def _repair(self, then: Act) -> bool:
        """Fetches another's state if that is due; does `then` when it is here."""
        failed = frozenset({0} if self.optimizer.failed else ())
        due = choose_repair(self.me, (self._digest,), self.swarm.members(self.number), failed)
        if due is None:
            return False
        donor: MeanPeer = self.swarm.endpoints[int(due.donor.peer[1:])]
        stream = self.swarm.network.open(self.number, donor.number)
        self._fetching = (stream, then)
        stream.send(self.number, lambda: donor.asked(stream))
        return True

    def asked(self, stream: SimulatedStream) -> None:
        state = self.optimizer.state
        fetcher, size = self.swarm.endpoints[stream.caller], 8 * self.swarm.scenario.params
        stream.send(self.number, lambda: fetcher.fetched(stream, state), size)

    def fetched(self, stream: SimulatedStream, state: FragmentState) -> None:
        """The other's state is here; what was learned since the own anchor is kept."""
        stream.close()
        assert self._fetching is not None, "one state is fetched at a time"
        then, self._fetching = self._fetching[1], None
        self.local = self.optimizer.adopt(state, self.local, keep=True, me=self.me)
        self.commit()
        if self.version >= self.swarm.scenario.rounds:
            self._go_on()
        else:
            then()

    def on_stream(self, stream: Stream) -> Coroutine[None, None, None]:
        return self.reducer.serve(stream)

    def begin_round(self, round_: int, group: Group, values: Tensor) -> None:
        self._group, self._in_round = group, True
        self.spawn(self.contributor.begin(Begin(0, round_, group, values.repeat(len(group)))))

    def finished(self, result: RoundDone | RoundFailed) -> None:
        self._in_round = False
        super().finished(result)

    def advanced(self, version: int, group: Group) -> None:
        """This peer's own state is at that version. The others know at once."""
        self.as_own(lambda: self.reducer.advanced(0, version, group))
        for other in self.swarm.endpoints:
            if other is not self:
                self.swarm.clock.act(other.number, other.tick)

    def viewed(self) -> None:
        view = self.swarm.view(self.number)

        def tell() -> None:
            self.reducer.on_view(view)
            self.contributor.on_view(view)

        self.as_own(tell)

    def sizes(self) -> tuple[Sizes, Sizes]:
        scale = self._payload_bytes / len(self._group) / _SHARD_BYTES
        return frame_sizes(pb.ExchangeUp, scale), frame_sizes(pb.ExchangeDown, scale)

    def tick(self) -> None:
        """Time passes, for as long as a round is under way here."""

        def tell() -> None:
            self.reducer.tick()
            self.contributor.tick()

        self.as_own(tell)

    def as_own(self, act: Act) -> None:
        """Sees to it as well that time passes here while it has to."""
        super().as_own(act)
        if not self._ticking:
            self._ticking = True
            self.later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self._in_round or self._serving:
            self.tick()


def _state_hash(anchor: Tensor, momentum: Tensor, group: Group) -> int:
    return zlib.crc32(repr((group, anchor.tolist(), momentum.tolist())).encode())


def _where(of_value: Iterable[bool]) -> Ranges:
    return tuple((k, k + 1) for k, holds in enumerate(of_value) if holds)
