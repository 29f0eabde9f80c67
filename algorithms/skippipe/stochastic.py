"""Each microbatch to the replica of a stage with the least accumulated expected time (SWARM).

Ref: arXiv:2301.11913 section 3.2. Ours: the caller gives the time; ties go to the lower peer.
"""

from heapq import heapify, heappop, heappush

KEPT = 0.9  # share of the old average that a new measurement leaves


class ReplicaQueue:
    """What one peer knows of the replicas of one stage.

    Args:
        expected_s: of each replica, a first guess at the time for one microbatch.
        ban_s: how long a replica that failed is passed over.
    """

    def __init__(self, expected_s: dict[int, float], ban_s: float = 30.0) -> None:
        self._expected_s = dict(expected_s)
        self._ban_s = ban_s
        self._heap = [(0.0, peer) for peer in sorted(expected_s)]
        self._banned_until_s: dict[int, float] = {}

    def choose(self, now_s: float) -> int | None:
        """The replica for the next microbatch, which is charged for it; None if all are banned."""
        passed_over, chosen = [], None
        while self._heap and chosen is None:
            accumulated_s, peer = heappop(self._heap)
            if peer not in self._expected_s:
                continue  # it has left
            if self._banned_until_s.get(peer, now_s) > now_s:
                passed_over.append((accumulated_s, peer))
                continue
            chosen = peer
            heappush(self._heap, (accumulated_s + self._expected_s[peer], peer))
        for entry in passed_over:
            heappush(self._heap, entry)
        return chosen

    def measured(self, peer: int, took_s: float) -> None:
        """A replica has served a microbatch: moves its exponential average."""
        if peer in self._expected_s:
            kept_s = KEPT * self._expected_s[peer]
            self._expected_s[peer] = kept_s + (1 - KEPT) * took_s

    def failed(self, peer: int, now_s: float) -> None:
        """A replica has not answered or refused: bans it for a while."""
        self._banned_until_s[peer] = now_s + self._ban_s

    def joined(self, peer: int, expected_s: float) -> None:
        """A new replica begins at the current minimum, so that it is not flooded to catch up."""
        if peer in self._expected_s:
            return
        self._heap = [entry for entry in self._heap if entry[1] in self._expected_s]
        least_s = min((accumulated_s for accumulated_s, _ in self._heap), default=0.0)
        self._expected_s[peer] = expected_s
        self._heap.append((least_s, peer))
        heapify(self._heap)

    def left(self, peer: int) -> None:
        """A replica is gone."""
        self._expected_s.pop(peer, None)
        self._banned_until_s.pop(peer, None)
