"""A port of the router in front of this peer that leads to it, asked for by UPnP.

    this peer, 192.168.1.5:7700 --- router, 203.0.113.9:7700 --- other peers

It is asked for only where others cannot dial the peer, before a relay is. Once there is one, it is
asked for again and again: a router forgets it when it is restarted, and may get another address.
"""

import math
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from murmuration.protos.addresses import is_loopback, join_address, public_address, split_address
from murmuration.protos.events import Warnings, new_event
from murmuration.worker.background import Component, workers
from murmuration.worker.membership.gossip import GossipService

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_ANSWER_MS = 500  # of each of four questions: a router answers in less
_LEASE_S = 3600  # after it a port is closed that a killed peer has left open
_AGAIN_S = 60.0
_PORTS = range(20_000, 60_000)
_TRIES = 4  # other ports, where the router has given this one to another machine


class NoRouterPort(Exception):
    """No router gives a port; says why."""


class UpnpRouter:
    """The router of this machine, if it speaks UPnP. What blocks for seconds has its own thread."""

    def __init__(self) -> None:
        self.offload = workers(1)

    def open(self, bound: str, before: str) -> str:
        """Has a port lead to HOST:PORT here: that of `before`, or the same, if it is free. Returns
        HOST:PORT that the internet dials, and the one that neighbours dial. Raises NoRouterPort."""
        host, own = split_address(bound)
        if is_loopback(host):
            raise NoRouterPort(f"no other machine reaches {bound}, which this one listens on")
        router, refused = self._found(), ""
        ports = [*([split_address(public_address(before))[1]] if before else []), own]
        ports += random.sample(_PORTS, _TRIES)
        for port, lease_s in [*((port, _LEASE_S) for port in ports), (own, 0)]:  # some know no end
            try:
                router.addportmapping(port, "TCP", router.lanaddr, own, "murmuration", "", lease_s)
                near = join_address(router.lanaddr, own)
                return f"{join_address(router.externalipaddress(), port)},{near}"
            except Exception as error:  # the library has no others
                refused = refused or str(error)
        raise NoRouterPort(f"the router opens no port for this machine: {refused}")

    def close(self, address: str) -> None:
        """Closes what `open` has opened; a router that does not answer forgets it itself."""
        with suppress(Exception):  # the library has no others
            port = split_address(public_address(address))[1]
            self._found().deleteportmapping(port, "TCP")

    @staticmethod
    def _found() -> Any:
        try:
            import miniupnpc
        except ImportError as error:
            raise NoRouterPort(f"no router is asked for a port: {error}") from error
        router = miniupnpc.UPnP()
        router.discoverdelay = _ANSWER_MS
        try:
            router.discover()
            router.selectigd()
        except Exception as error:  # the library has no others
            raise NoRouterPort("no router answers UPnP") from error
        return router


class RouterPort(Component):
    """This peer's port of the router. io thread only. Args: bound: HOST:PORT of its own server."""

    refused = ""  # why there is no port

    def __init__(self, gossip: GossipService, bound: str, node: "Node") -> None:
        self._gossip, self._bound, self._node = gossip, bound, node
        self._warnings = Warnings(node.log)
        self._address = ""  # that others dial, while there is one
        self._again_at = -math.inf

    async def begin(self, address: str) -> bool:
        """Asks the router for a port; False if there is none, or one was asked for lately."""
        if self._address or self._node.clock() < self._again_at:
            return False
        await self._ask()
        return bool(self._address)

    def tick(self) -> None:
        if self._address and self._node.clock() >= self._again_at:
            self._again_at = self._node.clock() + _AGAIN_S
            leads_here = self._gossip.me.address == self._address
            self._node.spawn(self._ask() if leads_here else self.close())

    async def close(self) -> None:
        if address := self._address:
            self._address = ""
            await self._node.router.offload(lambda: self._node.router.close(address))

    async def _ask(self) -> None:
        node, router = self._node, self._node.router
        self._again_at = node.clock() + _AGAIN_S
        try:
            address = await router.offload(lambda: router.open(self._bound, self._address))
            address = address if node.transport.encrypted else public_address(address)
        except NoRouterPort as error:
            self.refused = str(error)
            if self._address:
                self._warnings.add(f"others may not reach this peer: {error}")
            return
        if address != self._address:
            self._address = address
            self._node.tunnels.own = (address, self._bound)
            self._gossip.update(address=address)
            self._node.log(new_event("router_port", address=address))
