"""Carries out the choice of relays: keeps a stream at each of them, and accepts who dials there."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from murmuration.protos import addresses, murmuration_pb2 as pb
from murmuration.protos.addresses import public_address, relayed_address, split_relayed
from murmuration.protos.events import Warnings, new_event
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.background import Component, cancel
from murmuration.worker.membership import Health
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.node.own_address import neighbours_dial
from murmuration.worker.relay.choice import RelayChoice
from murmuration.worker.relay.service import ALIVE_S, SILENT_S
from murmuration.worker.relay.tunnels import first_of, message, own_port, pump, received
from murmuration.worker.transport import Method, Stream, TransportError

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_RESERVE_S, _TRY_S = 3.0, 5.0
_MOST_TUNNELS = 64  # that one relay has open here at once: no honest one takes more of a peer


class RelayedPeer(Component):
    """This peer, where nobody can dial it. io thread only. `bound`: of its own server."""

    def __init__(
        self,
        gossip: GossipService,
        bound: str,
        node: "Node",
        round_trip_s: Callable[[str], float | None],
    ) -> None:
        self._gossip, self._bound, self._node = gossip, bound, node
        self._round_trip_s = round_trip_s
        self._choice = RelayChoice(
            self._reserve, self._release, lambda at: node.spawn(self._try(at)), self._advertise
        )
        self._warnings = Warnings(node.log)
        self._held: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Future[bool]] = {}
        self._tunnels: Counter[str] = Counter()  # that are open, by relay

    async def begin(self, address: str) -> bool:
        """Asks the peer there to be the first relay; False if it is none, or there is one."""
        if self._choice.relays or split_relayed(address) is not None:
            return False
        asked = self._asked.setdefault(address, asyncio.get_running_loop().create_future())
        self._choice.want(address)
        return await asyncio.shield(asked)

    def tick(self) -> None:
        if not self._choice.wanted:
            return
        now, members, away = self._node.clock(), self._gossip.others, self._gossip.me.unreachable
        alive = (m for m in members if m.health is Health.ALIVE and m.peer not in away)
        able = (member for member in alive if split_relayed(member.address) is None)
        there = {public_address(m.address): (m.peer, self._round_trip_s(m.peer)) for m in able}
        gone = {public_address(member.address) for member in members if not member.live}
        self._choice.seen(there, gone, now)
        self._choice.tick(now)

    async def close(self) -> None:
        await cancel(self._held.values())

    def _reserve(self, address: str) -> None:
        self._held[address] = asyncio.ensure_future(self._hold(address))

    def _release(self, address: str) -> None:
        if (task := self._held.pop(address, None)) is not None:
            task.cancel()

    def _advertise(self, relays: tuple[str, ...]) -> None:
        # Without certificates any peer that neighbours find there would pass for it.
        near = neighbours_dial(self._bound) if self._node.transport.encrypted else ""
        address = relayed_address(self._gossip.me.peer, relays, near)
        self._gossip.update(address=address)
        self._node.log(new_event("relayed", by=list(self._choice.relays), address=address))

    async def _hold(self, asked: str) -> None:
        address, reserved = asked, False
        stream = self._node.transport.open(asked, Method.RESERVE)
        try:
            await stream.send(message(header=pb.RelayHeader(sender=self._gossip.me.peer)))
            opened = (await received(stream, _RESERVE_S)).opened
            at = public_address(opened.address)
            addresses.check_name(at, wire.WireError)
            addresses.check_address(at, opened.peer)
            if {"@", ";"} & {*at} or self._choice.is_of_another(at, asked, opened.peer):
                named = shown(f"{opened.peer} at {opened.address}")
                raise wire.WireError(f"it says that it is {named}, which is another")
            address = at
            self._held[address] = self._held.pop(asked)
            self._choice.reserved(asked, opened.peer, address, self._node.clock())
            reserved = True
            self._answer(asked, True)
            await first_of(self._live(stream), self._listen(stream, asked))
        except (TransportError, ValueError) as error:
            if not reserved:
                self._warnings.add(f"{asked} does not relay this peer", shown(str(error)))
        finally:
            stream.cancel()
            self._answer(asked, False)
        if self._held.pop(address, None) is not None:
            self._choice.lost(address, self._node.clock())
            if not self._choice.relays and any(member.live for member in self._gossip.others):
                self._warnings.add("no relay is left: nobody reaches this peer until there is one")

    def _answer(self, asked: str, reserved: bool) -> None:
        if (future := self._asked.pop(asked, None)) is not None:
            future.set_result(reserved)

    async def _live(self, stream: Stream) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            await stream.send(message(alive=True))

    async def _listen(self, stream: Stream, relay: str) -> None:
        while True:
            said = await received(stream, SILENT_S)
            if not said.HasField("dialled"):
                continue
            if self._tunnels[relay] < _MOST_TUNNELS:
                self._tunnels[relay] += 1
                self._node.spawn(self._accept(relay, said.dialled))
            else:  # the relay gives that dial up
                most = f"more than {_MOST_TUNNELS} tunnels at once"
                self._warnings.add(f"{relay} opens {most} to this peer: the others are refused")

    async def _accept(self, relay: str, number: int) -> None:
        stream = self._node.transport.open(relay, Method.ACCEPT)
        header = pb.RelayHeader(sender=self._gossip.me.peer, dialled=number)
        try:
            reader, writer = await asyncio.open_connection(*own_port(self._bound))
            await stream.send(message(header=header))
            await pump(stream, reader, writer)
        except (TransportError, OSError) as error:
            stream.cancel()
            self._warnings.add(f"nothing comes through the relay {relay}", str(error))
        finally:
            self._tunnels[relay] -= 1

    async def _try(self, relay: str) -> None:
        me, transport, leads_here = self._gossip.me.peer, self._node.transport, False
        address, request = relayed_address(me, (relay,)), pb.MeasureRequest().SerializeToString()
        transport.drop(address)  # a connection that is there says nothing of new ones
        try:
            await transport.call(address, Method.MEASURE, request, _TRY_S, me)
            leads_here = True
        except TransportError as error:
            self._warnings.add(f"nothing comes through the relay {relay}", shown(str(error)))
        self._choice.tried(relay, self._node.clock(), leads_here=leads_here)
