"""Each microbatch to the replica of a stage with the least accumulated expected time (SWARM).

Ref: arXiv:2301.11913 section 3.2. Ours: all microbatches of an iteration are shared out before it
begins, by times that the caller has averaged, so nobody joins, fails or is measured meanwhile; ties
go to the lower peer.
"""

from collections.abc import Mapping
from heapq import heapify, heapreplace


class ReplicaQueue:
    """The replicas of one stage. Args: expected_s: of each, the time that a microbatch takes."""

    def __init__(self, expected_s: Mapping[int, float]) -> None:
        self._expected_s = expected_s
        self._heap = [(0.0, peer) for peer in expected_s]
        heapify(self._heap)

    def choose(self) -> int:
        """The replica for the next microbatch, which is charged for it."""
        accumulated_s, peer = self._heap[0]
        heapreplace(self._heap, (accumulated_s + self._expected_s[peer], peer))
        return peer
