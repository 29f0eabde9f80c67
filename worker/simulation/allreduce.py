"""A peer's rounds of the leaderless mean: the live code, on the simulated network.

Each peer has a `Contributor` and a `Reducer`, whose coroutines run on a `SimulatedLoop`. A
contribution holds the task's 8 values once for each shard, so that all of them are in every shard;
only on the links do they count as many bytes as the scenario's parameters.
"""

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import TypeVar

from torch import Tensor

from algorithms.codecs import codec_by_name
from algorithms.presets import PRESETS
from algorithms.reducers import reducer_orders
from worker.exchange.allreduce.contributor import Contributor
from worker.exchange.allreduce.dialogue import ShardRange
from worker.exchange.allreduce.reducer import Reducer
from worker.exchange.arrivals import Arrivals
from worker.exchange.compression import Compression
from worker.exchange.context import Context, Tasks
from worker.exchange.types import ExchangeConfig
from worker.simulation.clock import Act
from worker.simulation.loop import context_of
from worker.simulation.network import SimulatedStream
from worker.simulation.peer import Account, Peer
from worker.simulation.streams import StreamEnd, open_stream
from worker.simulation.swarm import RUN, Group, SimulatedSwarm
from worker.simulation.task import VALUES, Quadratic
from worker.training.inbox import Begin, RoundDone, RoundFailed
from worker.transport import Stream, TransportError

T = TypeVar("T")

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


async def _at_once(work: Callable[[], T], /) -> T:
    return work()


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
        self._rounds, self.codec = rounds, codec_by_name(swarm.scenario.codec)
        self._payload_bytes = self.codec.encoded_bytes(swarm.scenario.params)
        self.context = self._new_context()
        self.reducer = Reducer(self.context)
        self.contributor = Contributor(self.context, self.reducer, self, self)
        self._own = context_of(number)
        self._group = swarm.names
        self._tasks, self._serving = Tasks(), 0
        self._in_round = self._ticking = False

    def _new_context(self) -> SimulatedContext:
        """As the modelled bytes ask for."""
        clock, elements = self.swarm.clock, self._payload_bytes // 4  # of fp32
        return SimulatedContext(
            me=self.me,
            run=RUN,
            elements=[elements],
            plan=PRESETS["diloco"],
            config=self.swarm.config,
            detection_s=self.swarm.detection_s(),
            clock=lambda: clock.now,
            offload=_at_once,
            log=lambda event: None,
            compression=Compression(ExchangeConfig(compression="never")),
            arrivals=Arrivals(lambda: clock.now),
        )

    @abstractmethod
    def ended(self, result: RoundDone | RoundFailed) -> None:
        """The own round has come to this."""

    def begin_round(self, round_: int, group: Group, values: Tensor) -> None:
        """Contributes these values."""
        self._group, self._in_round = group, True
        begin = Begin(0, round_, group, values.repeat(len(group)))
        self._as_own(lambda: self._spawn(self.contributor.begin(begin)))

    def finished(self, result: RoundDone | RoundFailed) -> None:
        """The train side hears of it."""
        self._in_round = False
        self.later(0.0, lambda: self.ended(result))

    def advanced(self, version: int, group: Group) -> None:
        """This peer's own state is at that version. The others know at once."""
        self._as_own(lambda: self.reducer.advanced(0, version, group))
        for other in self._rounds:
            if other is not self:
                self.swarm.act(other.number, other.tick)

    # ------------------------------------------------------------------------- membership, streams

    def viewed(self, changed: frozenset[str]) -> None:
        view = self.swarm.view(self.number)

        def tell() -> None:
            self.reducer.on_view(view)
            self.contributor.on_view(view)

        self._as_own(tell)

    def open(self, peer: str, method: str) -> Stream:
        """A stream to another peer."""
        other = self._rounds[int(peer[1:])]
        scale = self._payload_bytes / len(self._group) / _SHARD_BYTES
        near, far = open_stream(self.swarm.network, self.number, other.number, scale)
        far.opens(lambda: other.serve(far))
        return near

    def suspect(self, peer: str) -> None:
        """Membership is modelled: it finds out by itself."""

    def serve(self, end: StreamEnd) -> None:
        """A contributor has come."""

        async def work() -> None:
            self._serving += 1
            try:
                await self.reducer.serve(end)
                end.returned()
            except TransportError:
                pass
            finally:
                self._serving -= 1

        def begin() -> None:
            end.task = self._tasks.spawn(work())

        self._as_own(begin)

    def broken(self, stream: SimulatedStream) -> None:
        end = stream.users.get(self.number)
        if isinstance(end, StreamEnd):
            end.broke()

    # --------------------------------------------------------------------------------------- time

    def tick(self) -> None:
        """Time passes, for as long as a round is under way here."""

        def pass_on() -> None:
            self.reducer.tick()
            self.contributor.tick()

        self._as_own(pass_on)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.spawn(work)

    def _as_own(self, act: Act) -> None:
        """Does something of this peer's, and sees to it that time passes here while it has to."""
        self._own.copy().run(act)
        if not self._ticking:
            self._ticking = True
            self.later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self._in_round or self._serving:
            self.tick()
