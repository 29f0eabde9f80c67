"""The serving side of relaying: joins the streams of two peers, and reads nothing of them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Protocol

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import split_relayed
from murmuration.worker.exchange.types import View
from murmuration.worker.membership import Member
from murmuration.worker.relay.table import NoRelay, RelayTable
from murmuration.worker.relay.tunnels import first_of, message, received
from murmuration.worker.transport import Refused, Stream

ALIVE_S = 1.0  # between two signs of life
SILENT_S = 4.0  # after which the other side of a reservation is gone
_ACCEPT_S = 2.0
_HEADER_S = 10.0
_CLOSE_S = 1.0


class RelayMembers(Protocol):
    """What a relay knows of the run."""

    @property
    def me(self) -> Member: ...

    @property
    def members(self) -> tuple[Member, ...]: ...


class RelayService:
    """io thread only.

    Args:
        table: what it relays, and how much.
        swarm: whom it knows.
        certified: whether callers have proved that they are of the run.
        clock: monotonic seconds.
    """

    def __init__(
        self, table: RelayTable, swarm: RelayMembers, certified: bool, clock: Callable[[], float]
    ) -> None:
        self.table, self._swarm, self._certified = table, swarm, certified
        self._clock = clock
        self._dialled: dict[str, asyncio.Queue[int | None]] = {}  # by peer with a place
        self._waiting: dict[int, asyncio.Future[tuple[Stream, asyncio.Event]]] = {}
        self._closing = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.streams = {
            "Relay/Reserve": self.reserve,
            "Relay/Dial": self.dial,
            "Relay/Accept": self.accept,
        }

    def on_view(self, view: View) -> None:
        """Membership has changed; `tick` sees to it."""

    def tick(self) -> None:
        """Peers that are no members, or none any more, are relayed for no longer."""
        if not self._dialled:
            return
        live = {member.peer for member in self._swarm.members if member.live}
        for peer in self.table.strangers(self._clock(), live):
            self._dialled[peer].put_nowait(None)

    async def close(self) -> None:
        """Ends all that it serves."""
        self._closing.set()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_S)

    async def reserve(self, stream: Stream) -> None:
        """Serves a peer that wants to be reached through this one, as long as both live. Raises
        Refused."""
        peer = (await _header(stream)).sender
        me = self._swarm.me
        with _refusing():
            relayed = split_relayed(me.address) is not None
            self.table.reserve(peer, self._clock(), relayed=relayed)
        if (before := self._dialled.get(peer)) is not None:
            before.put_nowait(None)
        dialled = self._dialled[peer] = asyncio.Queue()
        try:
            opened = pb.RelayOpened(peer=me.peer, address=me.address)
            await stream.send(message(opened=opened))
            await self._until_closed(_tell(stream, dialled), _hear(stream))
        finally:
            if self._dialled.get(peer) is dialled:
                del self._dialled[peer]
                self.table.release(peer)

    async def dial(self, stream: Stream) -> None:
        """Carries what a peer sends to one that is reached through this one. Raises Refused."""
        header = await _header(stream)
        live = (member.peer for member in self._swarm.members if member.live)
        known = self._certified or header.sender in live
        with _refusing():
            number = self.table.dial(header.sender, header.peer, known=known)
        accepted = self._waiting[number] = asyncio.get_running_loop().create_future()
        ended = None
        try:
            self._dialled[header.peer].put_nowait(number)
            async with asyncio.timeout(_ACCEPT_S):
                far, ended = await accepted
            await stream.send(message(opened=pb.RelayOpened()))
            await self._until_closed(
                self._carry(number, header.sender, stream, far),
                self._carry(number, header.peer, far, stream),
            )
        except TimeoutError:
            raise Refused("that peer does not accept") from None
        finally:
            del self._waiting[number]
            self.table.end(number)
            if ended is not None:
                ended.set()

    async def accept(self, stream: Stream) -> None:
        """The reserving peer's side of a dial. Raises Refused."""
        header = await _header(stream)
        with _refusing():
            self.table.accept(header.dialled, header.sender)
        ended = asyncio.Event()
        self._waiting[header.dialled].set_result((stream, ended))
        await self._until_closed(_waits(ended))

    async def _until_closed(self, *works: Coroutine[None, None, None]) -> None:
        """As `first_of`; ends too when this peer does."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await first_of(*works, _waits(self._closing))
        finally:
            self._serving.discard(task)

    async def _carry(self, number: int, sender: str, source: Stream, sink: Stream) -> None:
        while (raw := await source.receive()) is not None:
            if (wait_s := self.table.carry(number, sender, len(raw), self._clock())) > 0:
                await asyncio.sleep(wait_s)
            await sink.send(raw)


async def _header(stream: Stream) -> pb.RelayHeader:
    return (await received(stream, _HEADER_S)).header


async def _tell(stream: Stream, dialled: "asyncio.Queue[int | None]") -> None:
    """Until None is put in."""
    while True:
        try:
            async with asyncio.timeout(ALIVE_S):
                number = await dialled.get()
        except TimeoutError:
            await stream.send(message(alive=True))
            continue
        if number is None:
            return
        await stream.send(message(dialled=number))


async def _hear(stream: Stream) -> None:
    """Until the other side is silent. Raises Unreachable."""
    while True:
        await received(stream, SILENT_S)


async def _waits(event: asyncio.Event) -> None:
    await event.wait()


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except NoRelay as error:
        raise Refused(str(error)) from error
