"""A peer's rounds of the leaderless mean: the live code, on the simulated network.

Each peer has a `Contributor` and a `Reducer`, whose coroutines run on a `SimulatedLoop`. A
contribution holds the task's 8 values once for each shard, so that all of them are in every shard;
only on the links do they count as many bytes as the scenario's parameters.
"""

from collections.abc import Coroutine, Sequence
from functools import lru_cache

from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.presets import PRESETS
from murmuration.algorithms.reducers import reducer_orders
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import ShardRange
from murmuration.worker.simulation.clock import Act
from murmuration.worker.simulation.peer import Account, Peer
from murmuration.worker.simulation.streams import Sizes, frame_sizes
from murmuration.worker.simulation.swarm import RUN, Group, SimulatedSwarm
from murmuration.worker.simulation.task import VALUES, Quadratic
from murmuration.worker.training.inbox import Begin, RoundDone, RoundFailed
from murmuration.worker.transport import Stream

_TICK_S = 0.05  # as the live node's
_SHARD_BYTES = 4 * VALUES


class SimulatedContext(Context):
    """Of a swarm with one fragment, in which every shard holds all values of the task."""

    def shards(self, fragment: int, group: Sequence[str]) -> tuple[ShardRange, ...]:
        return _ranges(len(group))

    def orders(self, fragment: int, group: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        # One shard a peer: more of them keep a link busy, which shared links are anyway.
        return _orders(fragment, tuple(group))


@lru_cache(maxsize=4096)
def _orders(fragment: int, group: Group) -> tuple[tuple[str, ...], ...]:
    return reducer_orders(RUN, fragment, group)


@lru_cache(maxsize=256)
def _ranges(peers: int) -> tuple[ShardRange, ...]:
    size = _SHARD_BYTES
    return tuple(ShardRange(k * VALUES, (k + 1) * VALUES, size, size) for k in range(peers))


class MeanRounds(Peer):
    """The rounds of one peer; a subclass does what the train thread does around them.

    Args: peers: all of the swarm, by number.
    """

    _peers: "Sequence[MeanRounds]"

    def __init__(
        self,
        swarm: SimulatedSwarm,
        number: int,
        task: Quadratic,
        account: Account,
        peers: "Sequence[MeanRounds]",
    ) -> None:
        super().__init__(swarm, number, task, account, peers)
        self.codec = codec_by_name(swarm.scenario.codec)
        self._payload_bytes = self.codec.encoded_bytes(swarm.scenario.params)
        elements = self._payload_bytes // 4  # of fp32: as the modelled bytes ask for
        self.context = SimulatedContext(
            elements=[elements],
            plan=PRESETS["diloco"],
            config=swarm.config,
            **self.surroundings(),
        )
        self.reducer = Reducer(self.context)
        self.contributor = Contributor(self.context, self.reducer, self, self)
        self._group = swarm.names
        self._in_round = self._ticking = False

    def on_stream(self, stream: Stream) -> Coroutine[None, None, None]:
        return self.reducer.serve(stream)

    def begin_round(self, round_: int, group: Group, values: Tensor) -> None:
        """Contributes these values."""
        self._group, self._in_round = group, True
        self.spawn(self.contributor.begin(Begin(0, round_, group, values.repeat(len(group)))))

    def finished(self, result: RoundDone | RoundFailed) -> None:
        self._in_round = False
        super().finished(result)

    def advanced(self, version: int, group: Group) -> None:
        """This peer's own state is at that version. The others know at once."""
        self.as_own(lambda: self.reducer.advanced(0, version, group))
        for other in self._peers:
            if other is not self:
                self.swarm.act(other.number, other.tick)

    def viewed(self, changed: frozenset[str]) -> None:
        view = self.swarm.view(self.number)

        def tell() -> None:
            self.reducer.on_view(view)
            self.contributor.on_view(view)

        self.as_own(tell)

    def sizes(self) -> tuple[Sizes, Sizes]:
        scale = self._payload_bytes / len(self._group) / _SHARD_BYTES
        return frame_sizes(pb.ExchangeUp, scale), frame_sizes(pb.ExchangeDown, scale)

    # --------------------------------------------------------------------------------------- time

    def tick(self) -> None:
        """Time passes, for as long as a round is under way here."""

        def pass_on() -> None:
            self.reducer.tick()
            self.contributor.tick()

        self.as_own(pass_on)

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
