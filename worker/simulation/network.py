"""The network between simulated peers: links whose rate is shared, delays, streams that break.

A link gives everything that is under way in one direction an equal share of its rate. Bytes go
through the sender's link up and, a delay later, through the receiver's link down, and are there
when they have passed both. A link does not know that the other one is slower: its share is used up
all the same, so a crowded link looks a little worse than real ones. Messages without bytes take
only the delay. The live code has its streams over it (`StreamEnd`), message by message.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from murmuration.algorithms.link import lognormal
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.simulation.scenario import STALL_S, Scenario
from murmuration.worker.simulation.virtual_loop import Act, VirtualLoop
from murmuration.worker.transport import Unreachable

_CLOSE_BYTES = 1e-6  # what is as good as through


class Pipe:
    """One direction of a link: equal shares for all loads, by the bytes that each has had."""

    def __init__(self, clock: VirtualLoop, bytes_per_s: float) -> None:
        self._clock, self._rate = clock, bytes_per_s
        self._served, self._at = 0.0, 0.0
        # By number: what each load has had served when it is through, and what to do then.
        self._loads: dict[int, tuple[float, Act]] = {}
        self._ends: list[tuple[float, int]] = []
        self._added = self._timers = 0

    def add(self, size: float, done: Act) -> int:
        """Begins to carry this many bytes; calls `done` when they are through."""
        self._advance()
        end = self._served + size
        self._added += 1
        self._loads[self._added] = end, done
        heapq.heappush(self._ends, (end, self._added))
        self._set_timer()
        return self._added

    def remove(self, load: int) -> float:
        """Takes a load off; returns the bytes that had not passed, 0 if it was through."""
        if load not in self._loads:
            return 0.0
        self._advance()
        left = max(0.0, self._loads.pop(load)[0] - self._served)
        self._set_timer()
        return left

    def _advance(self) -> None:
        now = self._clock.now
        if self._loads:
            self._served += (now - self._at) * self._rate / len(self._loads)
        self._at = now

    def _set_timer(self) -> None:
        """For when the next load is through, as things are."""
        self._timers += 1
        while self._ends and self._ends[0][1] not in self._loads:
            heapq.heappop(self._ends)
        if not self._ends:
            self._served = 0.0
            return
        left, timer = max(0.0, self._ends[0][0] - self._served), self._timers
        self._clock.after(left * len(self._loads) / self._rate, lambda: self._complete(timer))

    def _complete(self, timer: int) -> None:
        if timer != self._timers:
            return
        self._advance()
        self._served = max(self._served, self._ends[0][0])
        through: list[Act] = []
        while self._ends and self._ends[0][0] <= self._served + _CLOSE_BYTES:
            if (load := self._loads.pop(heapq.heappop(self._ends)[1], None)) is not None:
                through.append(load[1])
        self._set_timer()
        for done in through:
            done()


@dataclass(slots=True, eq=False)
class _Message:
    deliver: Act
    size: int
    left: Act | None
    here: bool = False
    up: int = 0  # its bytes on the sender's link, and on the receiver's
    down: int = 0
    passed: int = 0  # links; below 0 it never arrives


class SimulatedStream:
    """Messages both ways between two peers, in order, until an end closes it or it breaks."""

    def __init__(self, network: "Network", number: int, ends: tuple[int, int]) -> None:
        self._network, self.number = network, number
        self.caller, self.callee = ends
        self.ended = False
        self.users: dict[int, object] = {}  # by the peer at that end
        self._queues: dict[int, deque[_Message]] = {self.caller: deque(), self.callee: deque()}
        self._unsent: dict[int, deque[_Message]] = {self.caller: deque(), self.callee: deque()}

    def other(self, end: int) -> int:
        return self.callee if end == self.caller else self.caller

    def send(self, sender: int, deliver: Act, size: int = 0, left: Act | None = None) -> None:
        """Sends to the other end, which then does `deliver`; `left` is done when it has left."""
        if self.ended:
            return
        message = _Message(deliver, size, left)
        self._queues[sender].append(message)
        self._unsent[sender].append(message)
        if len(self._unsent[sender]) == 1:
            self._send_next(sender)

    def _send_next(self, sender: int) -> None:
        network, unsent, ends = self._network, self._unsent[sender], (sender, self.other(sender))
        while unsent and not self.ended:
            if not network.connected(*ends):
                network.stall(self)
                return
            message = unsent[0]
            here = partial(self._here, sender, message)
            if message.size > 0:
                network.carry(message, ends, partial(self._sent, sender, message), here)
                return
            network.clock.after(network.delay_s(*ends), here)
            unsent.popleft()

    def _sent(self, sender: int, message: _Message) -> None:
        if message in self._unsent[sender]:
            self._unsent[sender].popleft()
            if message.left is not None:
                message.left()
            self._send_next(sender)

    def close(self) -> None:
        """Nothing more is to come. Bytes under way stop, and nobody is told."""
        if self.ended:
            return
        self.ended = True
        self._network._streams.pop(self.number, None)
        for sender, queue in self._queues.items():
            for message in queue:
                self._network.stop(message, (sender, self.other(sender)))
            queue.clear()
            self._unsent[sender].clear()

    def _here(self, sender: int, message: _Message) -> None:
        if self.ended or not self._network.connected(self.caller, self.callee):
            return
        message.here = True
        queue = self._queues[sender]
        while queue and queue[0].here and not self.ended:
            self._network.clock.act(self.other(sender), queue.popleft().deliver)


OnBreak = Callable[[int, SimulatedStream], None]  # the end that finds out, and what has broken


class Network:
    """All links and streams. Peers are numbers. `rng` draws delays and broken streams."""

    _stream_type = SimulatedStream

    def __init__(
        self, clock: VirtualLoop, scenario: Scenario, rng: Random, on_break: OnBreak
    ) -> None:
        self.clock, self.sent_bytes = clock, 0.0
        link, spread = scenario.link, scenario.latency_spread
        bytes_per_s = link.rate_mbps * 1e6 / 8
        self.up = [Pipe(clock, bytes_per_s) for _ in range(scenario.peers)]
        self.down = [Pipe(clock, bytes_per_s) for _ in range(scenario.peers)]
        self._link, self._rng, self._on_break = link, rng, on_break
        self._time = lognormal(link.delay_s, spread) if spread else None
        self._streams: dict[int, SimulatedStream] = {}
        self._opened = 0
        self._dead: set[int] = set()
        self._half: frozenset[int] = frozenset()

    def delay_s(self, one: int, other: int) -> float:
        if self._time is not None:
            return self._rng.lognormvariate(*self._time)
        reach_s = self._link.jitter_s
        return self._link.delay_s + (self._rng.uniform(-reach_s, reach_s) if reach_s else 0.0)

    def connected(self, one: int, other: int) -> bool:
        return (one in self._half) == (other in self._half)

    def open(self, caller: int, callee: int) -> SimulatedStream:
        """A stream that is used at once; it breaks if nobody can be reached."""
        self._opened += 1
        stream = self._stream_type(self, self._opened, (caller, callee))
        self._streams[stream.number] = stream
        if callee in self._dead:
            self.clock.after(2 * self.delay_s(caller, callee), lambda: self.break_off(stream))
        elif self._link.loss:
            lives_s = self._rng.expovariate(2 * self._link.loss / 60)
            self.clock.after(lives_s, lambda: self.break_off(stream))
        return stream

    def carry(self, message: _Message, ends: tuple[int, int], sent: Act, arrived: Act) -> None:
        """The bytes of a message go over both links; does `sent`, and then `arrived`."""
        (sender, receiver), delay_s = ends, self.delay_s(*ends)

        def enter() -> None:
            if message.passed >= 0:
                message.down = self.down[receiver].add(message.size, passed)

        def left() -> None:
            self.clock.after(delay_s, passed)
            sent()

        def passed() -> None:
            message.passed += 1
            if message.passed == 2:
                arrived()

        self.sent_bytes += message.size
        message.up = self.up[sender].add(message.size, left)
        self.clock.after(delay_s, enter)

    def stop(self, message: _Message, ends: tuple[int, int]) -> None:
        """A message that is under way never arrives; what has not been sent does not count."""
        if message.size and not message.here:
            self.sent_bytes -= self.up[ends[0]].remove(message.up)
            self.down[ends[1]].remove(message.down)
            message.passed = -2

    def break_off(self, stream: SimulatedStream) -> None:
        if not stream.ended:
            stream.close()
            for end in (stream.caller, stream.callee):
                self._tell(end, stream)

    def abort(self, stream: SimulatedStream, by: int) -> None:
        """One end drops the stream; the other finds out a delay later."""
        if not stream.ended:
            stream.close()
            other = stream.other(by)
            self.clock.after(self.delay_s(by, other), lambda: self._tell(other, stream))

    def stall(self, stream: SimulatedStream, found_s: float = STALL_S) -> None:
        self.clock.after(found_s, lambda: self.break_off(stream))

    def die(self, peer: int) -> None:
        """Its process is gone, and its connections with it."""
        self._dead.add(peer)
        for stream in list(self._streams.values()):
            if peer in (stream.caller, stream.callee):
                self.abort(stream, peer)

    def split(self, half: frozenset[int]) -> None:
        """Cuts these peers from the others; nobody: the partition is over."""
        self._half = half
        for stream in list(self._streams.values()):
            if not self.connected(stream.caller, stream.callee):
                self.stall(stream)

    def _tell(self, end: int, stream: SimulatedStream) -> None:
        self.clock.act(end, lambda: self._on_break(end, stream))


Sizes = Callable[[bytes], int]
"""The bytes that a message counts on the links, 0 for none."""


class StreamEnd:
    """One end, as the live code uses it (`murmuration.worker.transport.Stream`). `task` serves the
    stream, if this is the callee's; `opens` is done when the first message has come."""

    def __init__(self, network: Network, stream: SimulatedStream, me: int, sizes: Sizes) -> None:
        self.other: StreamEnd
        self.task: asyncio.Task[None] | None = None
        self.opens: Act | None = None
        self._network, self._stream, self._me, self._size = network, stream, me, sizes
        self._come: deque[bytes | None] = deque()
        self._ended = self._broken = False
        self._waits: asyncio.Future[None] | None = None  # for a message
        self._sends: asyncio.Future[None] | None = None  # until it has left

    async def send(self, message: bytes) -> None:
        """Returns when the message has left, at once if it has no payload. Raises Unreachable."""
        self._check()
        size = self._size(message)
        if not size:
            self._pass(message)
            return
        sends = self._sends = asyncio.get_running_loop().create_future()
        self._pass(message, size, partial(_wake, sends))
        await sends
        self._check()

    async def done(self) -> None:
        if self._me == self._stream.caller:
            self._check()
            self._pass(None)

    def returned(self) -> None:
        if not self._broken:
            self._pass(None)

    async def receive(self) -> bytes | None:
        """The next message, None when the other side is done. Raises Unreachable."""
        if self._ended:
            return None
        while not self._come:
            self._check()
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        message = self._come.popleft()
        self._ended = message is None
        return message

    def cancel(self) -> None:
        """Ends the stream for both sides; the other one finds out a delay later."""
        if self._broken:
            return
        if self._ended or None in self._come:
            self._stream.close()
        else:
            self._network.abort(self._stream, self._me)

    def broke(self) -> None:
        self._broken = True
        _wake(self._waits)
        _wake(self._sends)
        if self.task is not None:
            self.task.cancel()

    def _pass(self, message: bytes | None, size: int = 0, left: Act | None = None) -> None:
        self._stream.send(self._me, partial(self.other._came, message), size, left=left)

    def _came(self, message: bytes | None) -> None:
        self._come.append(message)
        _wake(self._waits)
        begin, self.opens = self.opens, None
        if begin is not None:
            begin()

    def _check(self) -> None:
        if self._broken:
            raise Unreachable("a stream broke")


def _wake(waits: asyncio.Future[None] | None) -> None:
    if waits is not None and not waits.done():
        waits.set_result(None)


def frame_sizes(kind: type[pb.ExchangeUp] | type[pb.ExchangeDown], scale: float) -> Sizes:
    """Counts `scale` bytes for each byte of a frame's payload."""

    def size(message: bytes) -> int:
        parsed = kind.FromString(message)
        return round(len(parsed.frame.payload) * scale) if parsed.HasField("frame") else 0

    return size


def open_stream(
    network: Network, caller: int, callee: int, sizes: tuple[Sizes, Sizes]
) -> tuple[StreamEnd, StreamEnd]:
    stream = network.open(caller, callee)
    near = StreamEnd(network, stream, caller, sizes[0])
    far = StreamEnd(network, stream, callee, sizes[1])
    near.other, far.other = far, near
    stream.users |= {caller: near, callee: far}
    return near, far
