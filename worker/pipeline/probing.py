"""Which link is measured next: each once soon after its peer is there, again when it has been idle.

One at a time and one a second at most: a probe takes a line of 5 Mbit/s for 0.08 s. Real traffic
counts as a measurement, so that only idle links are probed again. A peer measures its links to 32
others, in a larger swarm to those that a hash chooses, so that each has about as many to answer.
"""

import math
from collections.abc import Callable, Sequence

import xxhash

from worker.membership import Member
from worker.pipeline.context import serves

PROBE_BYTES = 48 * 1024
_GAP_S = 1.0
_MOST_PEERS = 32
# To all 32 every five minutes: 5 kB/s, under 1 % of 5 Mbit/s. What changes faster than that would
# make plans that are out of date when they are found.
_AGAIN_S = 300.0
_RETRY_S = 30.0  # after a failure; who is really gone is known to be so by then


class Probing:
    """One peer's; sans-I/O. Times are monotonic seconds.

    Args:
        measured_at: when the rate to a peer was measured last, by whatever traffic; None for never.
    """

    def __init__(self, me: str, measured_at: Callable[[str], float | None]) -> None:
        self._me, self._measured_at = me, measured_at
        self._failed: dict[str, float] = {}
        self._busy = False
        self._next_s = -math.inf

    def next(self, members: Sequence[Member], now: float) -> Member | None:
        """Whom to measure now; `ended` is to follow."""
        if self._busy or now < self._next_s:
            return None
        self._next_s = now + _GAP_S
        able = [member for member in members if serves(member)]
        others = [member for member in able if member.peer != self._me]
        if len(others) == len(able):
            return None  # this peer does not serve yet
        self._failed = {c.peer: self._failed[c.peer] for c in others if c.peer in self._failed}
        mine = sorted(others, key=self._rank)[:_MOST_PEERS]
        due = min(mine, key=self._due_s, default=None)
        if due is None or self._due_s(due) > now:
            return None
        self._busy = True
        return due

    def ended(self, peer: str, answered: bool, now: float) -> None:
        """The probe is over."""
        self._busy = False
        self._next_s = now + _GAP_S
        if answered:
            self._failed.pop(peer, None)
        else:
            self._failed[peer] = now

    def _rank(self, member: Member) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._me}/{member.peer}".encode())

    def _due_s(self, member: Member) -> float:
        measured_s = self._measured_at(member.peer)
        again_s = -math.inf if measured_s is None else measured_s + _AGAIN_S
        return max(again_s, self._failed.get(member.peer, -math.inf) + _RETRY_S)
