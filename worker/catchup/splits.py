"""Reducers that give other bytes to each peer: noticed where states part, named, and passed over.

Peers whose states were equal and differ one version later compare the reductions that led there.
Where one reducer has given them different reductions of a shard, it is named, once. One such peer
may lie about what it was given. Where two or more, and most, each have another one, it is the
reducer that lies. Where these have the same one, this peer alone was given another: so it is in the
third such round of eight.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from murmuration.algorithms.robust import Doubts
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Warnings
from murmuration.worker.catchup.held_states import Received
from murmuration.worker.catchup.state_transfer import headers_at
from murmuration.worker.membership import Member
from murmuration.worker.membership.gossip import GossipService

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_LOOK_S = 1.0
_ASKED = 16
_BACK = 4  # rounds up to the one after which states are seen to differ


class Splits:
    """Looks for such reducers. I/O thread only."""

    def __init__(self, gossip: GossipService, node: "Node") -> None:
        self._gossip, self._node = gossip, node
        self._warnings = Warnings(node.log)
        self._named: set[str] = set()
        self._doubts = Doubts()
        self._next_at = 0.0

    async def look(self, voters: Sequence[Member]) -> None:
        """Compares where somebody's state is seen to differ at a version that this peer has had.

        Args: voters: the others whose word counts.
        """
        node, now = self._node, self._node.clock()
        apart = {
            (index, digest.version)
            for member in voters
            for index, digest in enumerate(member.digests)
            if node.held.hash_of(index, digest.version) not in (0, digest.hash)
        }
        if not apart or now < self._next_at:
            return
        self._next_at = now + _LOOK_S
        index, version = max(apart)
        wanted = [
            (at, mine)
            for at in range(version, max(0, version - _BACK), -1)
            if (mine := node.held.received(index, at))
        ]
        asked = [(index, each) for at, _ in wanted for each in (at, at - 1)]
        peers = [member.peer for member in voters[:_ASKED]]
        answers = await asyncio.gather(
            *(headers_at(node.transport, m, self._gossip.run, asked) for m in voters[:_ASKED])
        )
        for place, (at, mine) in enumerate(wanted):
            before = node.held.hash_of(index, at - 1)
            theirs = {
                peer: told[2 * place]
                for peer, told in zip(peers, answers, strict=True)
                if told and before and told[2 * place + 1].hash == before
            }
            self._compare(mine, theirs, index, at)

    def _compare(
        self, mine: Sequence[Received], theirs: dict[str, pb.StateHeader], index: int, at: int
    ) -> None:
        for shard, (reducer, source, hash_) in enumerate(mine):
            found = {
                peer: header.reductions[shard]
                for peer, header in theirs.items()
                if peer != reducer
                and len(header.sources) == len(header.reductions) == len(mine)
                and header.sources[shard] == source
            }
            others = {peer: each for peer, each in found.items() if each != hash_}
            if not others or reducer == self._gossip.me.peer:
                continue
            if reducer not in self._named:
                self._named.add(reducer)
                self._warnings.add(
                    f"{reducer} gave {', '.join(sorted(others))} another reduction of version {at} "
                    f"of fragment {index} than this peer, or they say so falsely"
                )
            if len(others) > 1 and 2 * len(others) > len(found):
                distinct = len({*others.values()}) == len(others)
                if distinct or self._doubts.again(reducer, index, at):
                    why = "each peer has" if distinct else "most others have"
                    self._node.context.caught(reducer, f"{why} another one")
