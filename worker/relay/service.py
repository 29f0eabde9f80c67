"""The serving side of relaying: joins the streams of two peers of the run, and reads nothing of
them. A relay dials nobody: both come to it, and one of them has reserved a place before."""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Coroutine
from dataclasses import dataclass
from typing import Any

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import split_relayed
from murmuration.worker.background import Component
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.relay.tunnels import first_of, message, received
from murmuration.worker.transport import Method, Refused, Stream

_UNKNOWN_S = 10.0  # that a peer may have a place before it is a member: it joins through it
_UNACCEPTED, _UNACCEPTED_EACH = 16, 4  # dials to one peer that it has not accepted yet, by one
_TUNNELS_EACH = 8  # from one peer to another: two connections, and those before
_ACTIVE_S = 1.0  # that a peer has its share of the rate after it has sent something
RATE_MBPS, PLACES = 100.0, 32
_BURST_S = 0.25  # of the rate: what goes at once after a pause


@dataclass
class _Dial:
    by: str
    to: str
    accepted: bool = False


class RelayTable:
    """One peer's, as a relay. All tunnels together may carry `rate_mbps`, each direction counted;
    peers that send at a time have equal shares, however many tunnels they have. 0: it is no relay.
    It relays for so many `places` peers at once."""

    def __init__(self, rate_mbps: float = RATE_MBPS, places: int = PLACES) -> None:
        self._rate_mbps, self._most = rate_mbps, places
        self._places: dict[str, float] = {}  # since when
        self._dials: dict[int, _Dial] = {}
        self._last = 0
        self._free_at: dict[str, float] = {}  # by peer: when its share is free again
        self.carried_bytes: Counter[str] = Counter()  # of each peer that has had a place

    @property
    def tunnels(self) -> int:
        return sum(dial.accepted for dial in self._dials.values())

    def document(self) -> dict[str, object]:
        relayed_bytes = dict(self.carried_bytes)
        return {"for": list(self._places), "tunnels": self.tunnels, "relayed_bytes": relayed_bytes}

    def reserve(self, peer: str, now: float, *, relayed: bool) -> None:
        """Gives a place, or keeps it. Raises Refused: it is full, or itself `relayed`."""
        if not self._rate_mbps:
            raise Refused("it relays for nobody (--relay-mbps 0)")
        if relayed:
            raise Refused("it is itself reached through a relay")
        if peer not in self._places and len(self._places) >= self._most:
            raise Refused(f"it relays for {self._most} peers already")
        self._places[peer] = now

    def release(self, peer: str) -> None:
        self._places.pop(peer, None)

    def dial(self, by: str, to: str, *, known: bool) -> int:
        """The number of a dial for `to`. Args: known: `by` is of the run. Raises Refused."""
        if not known:
            raise Refused("it relays between members only")
        if to not in self._places:
            raise Refused("that peer is not reached through it")
        there = [each for each in self._dials.values() if each.to == to]
        if sum(each.by == by for each in there) >= _TUNNELS_EACH:  # it has room for 64 of all
            raise Refused(f"{_TUNNELS_EACH} tunnels lead from one peer to that one already")
        waiting = [each for each in there if not each.accepted]
        own = sum(each.by == by for each in waiting)
        if len(waiting) >= _UNACCEPTED or own >= _UNACCEPTED_EACH:
            raise Refused(f"{len(waiting)} dials wait for that peer")
        self._last += 1
        self._dials[self._last] = _Dial(by, to)
        return self._last

    def accept(self, number: int, by: str) -> None:
        """Raises Refused: nobody dials the peer by that number."""
        dial = self._dials.get(number)
        if dial is None or dial.to != by or dial.accepted:
            raise Refused("nobody dials it by that number")
        dial.accepted = True

    def end(self, number: int) -> None:
        self._dials.pop(number, None)

    def carry(self, number: int, sender: str, size_bytes: int, now: float) -> float:
        """Counts bytes of a tunnel; how many seconds they wait for their sender's share."""
        self.carried_bytes[self._dials[number].to] += size_bytes
        since = now - _ACTIVE_S
        self._free_at = {p: at for p, at in self._free_at.items() if p == sender or at > since}
        free_at = max(self._free_at.get(sender, 0.0), now - _BURST_S)
        others = len(self._free_at.keys() - {sender})
        free_at += 8e-6 * size_bytes * (1 + others) / self._rate_mbps
        self._free_at[sender] = free_at
        return max(0.0, free_at - now)

    def strangers(self, now: float, members: Container[str]) -> list[str]:
        """Peers that have a place, are no live members, and have had the time to become some."""
        had_time = (peer for peer, since in self._places.items() if now - since > _UNKNOWN_S)
        return [peer for peer in had_time if peer not in members]


ALIVE_S = 1.0  # between two signs of life
SILENT_S = 4.0  # after which the other side of a reservation is gone
_ACCEPT_S = 2.0
_HEADER_S = 10.0
_CLOSE_S = 1.0


class RelayService(Component):
    """Serves as a relay. io thread only. Args: certified: callers have proved to be of the run."""

    def __init__(
        self, table: RelayTable, swarm: GossipService, certified: bool, clock: Callable[[], float]
    ) -> None:
        self.table, self._swarm, self._certified = table, swarm, certified
        self._clock = clock
        self._dialled: dict[str, asyncio.Queue[int | None]] = {}  # by peer with a place
        self._waiting: dict[int, asyncio.Future[tuple[Stream, asyncio.Event]]] = {}
        self._closing = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.streams: dict[str, Callable[[Stream], Coroutine[Any, Any, None]]] = {
            Method.RESERVE: self.reserve,
            Method.DIAL: self.dial,
            Method.ACCEPT: self.accept,
        }

    def tick(self) -> None:
        """Peers that are no members, or none any more, are relayed for no longer."""
        if not self._dialled:
            return
        live = {member.peer for member in self._swarm.members if member.live}
        for peer in self.table.strangers(self._clock(), live):
            self._dialled[peer].put_nowait(None)

    async def close(self) -> None:
        self._closing.set()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CLOSE_S)

    async def reserve(self, stream: Stream) -> None:
        """Serves a peer that is reached through this one, while both live. Raises Refused."""
        peer = (await received(stream, _HEADER_S)).header.sender
        me = self._swarm.me
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
        header = (await received(stream, _HEADER_S)).header
        live = (member.peer for member in self._swarm.members if member.live)
        known = self._certified or header.sender in live
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
        header = (await received(stream, _HEADER_S)).header
        self.table.accept(header.dialled, header.sender)
        ended = asyncio.Event()
        self._waiting[header.dialled].set_result((stream, ended))
        await self._until_closed(ended.wait())

    async def _until_closed(self, *works: Coroutine[Any, Any, object]) -> None:
        """As `first_of`; ends too when this peer does."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await first_of(*works, self._closing.wait())
        finally:
            self._serving.discard(task)

    async def _carry(self, number: int, sender: str, source: Stream, sink: Stream) -> None:
        while (raw := await source.receive()) is not None:
            if (wait_s := self.table.carry(number, sender, len(raw), self._clock())) > 0:
                await asyncio.sleep(wait_s)
            await sink.send(raw)


async def _tell(stream: Stream, dialled: "asyncio.Queue[int | None]") -> None:
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
