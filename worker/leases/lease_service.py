"""Carries out what the rules of leases say, over the transport."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import new_event
from murmuration.worker import wire
from murmuration.worker.background import Component
from murmuration.worker.exchange.view import View
from murmuration.worker.leases import ledger as ledgers
from murmuration.worker.leases.lease_table import LeaseTable
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.transport import Method, TransportError

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_CALL_S = 3.0
_POLL_S = 0.02


class LeaseService(Component):
    """One peer's leases, live. io thread only. Args: ledger: what is used, from a checkpoint."""

    def __init__(
        self, run: int, gossip: GossipService, node: "Node", ledger: ledgers.Ledger
    ) -> None:
        self._run, self._gossip, self._node = run, gossip, node
        self._group: asyncio.TaskGroup | None = None
        tell = self._announce, self._silent, self._differs, node.post
        self._table = LeaseTable(gossip.me.peer, ledger, *tell)
        self.on_view(gossip.swarm)

    def on_view(self, _view: View) -> None:
        self._table.on_view(self._gossip.swarm, self._gossip.me.start_ms)

    def tick(self) -> None:
        self._table.tick(self._node.clock())

    def handle(self, message: ledgers.ShareMessage) -> None:
        self._table.heard(message)

    async def on_lease(self, request: bytes) -> bytes:
        """Raises WireError."""
        news = wire.lease_news_from_message(wire.parse(pb.LeaseNews, request), self._run)
        return wire.lease_news_to_message(self._table.answer(news), self._run).SerializeToString()

    async def leave(self, within_s: float) -> None:
        """Gives back what is held, and waits until all that are alive know it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                self._group = group  # the node spawns nothing any more
                self._table.close()
                while not self._table.idle:
                    await asyncio.sleep(_POLL_S)
                    self.tick()

    def _announce(self, peer: str, number: int, news: ledgers.LeaseNews) -> None:
        work = self._tell(peer, number, news)
        if self._group is None:
            self._node.spawn(work)
            return
        try:
            self._group.create_task(work)
        except RuntimeError:  # the group has ended
            work.close()

    def _silent(self, peer: str, passed_over: bool) -> None:
        self._gossip.suspect(peer)
        if passed_over:
            text = f"{peer} answers no lease of samples: none waits for its answers"
            self._node.log(new_event("warning", text=text))

    def _differs(
        self, peer: str, stream: ledgers.SampleStream, theirs: ledgers.OpenedStream
    ) -> None:
        named = f" named {stream.name!r}" if stream.name else ""
        what = f"{peer} has other samples than this peer, or in another order"
        if theirs.length != (stream.length or 0):
            what = f"{peer} shares out {theirs.length} samples, and this peer {stream.length}"
        text = (
            f"{what} (swarm.shard{named}): what one holds out, the other may train on; build data, "
            "splits and samplers alike on every peer, with fixed generators, augment by those of "
            "random, numpy or torch, and give each set of data a name of its own"
        )
        self._node.log(new_event("warning", text=text))

    async def _tell(self, peer: str, number: int, news: ledgers.LeaseNews) -> None:
        request = wire.lease_news_to_message(news, self._run).SerializeToString()
        address = self._gossip.address_of(peer)
        try:
            if address is None:
                raise TransportError("no address known")
            raw = await self._node.transport.call(address, Method.LEASE, request, _CALL_S, peer)
            theirs = wire.lease_news_from_message(wire.parse(pb.LeaseNews, raw), self._run)
            self._table.answered(peer, number, theirs)
        except (TransportError, wire.WireError):
            self._table.unanswered(peer, self._node.clock())
