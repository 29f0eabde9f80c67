"""The time between two pair rounds: how far partners are apart, and anchors that come ahead."""

from collections.abc import Sequence

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.pairwise.round import ANCHOR, PairRound
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import Group

_QUIET_S = 1.0  # several delays of a long link pass before the first byte


class AnchorPrefetch:
    """When the train side hears of the mean of its group's anchors before a round.

    The mean is told as soon as it is known. Without overlap the train side waits for it; it is told
    too when it may go on without. Args: round_bytes: by fragment, what a peer gives each partner.
    """

    def __init__(self, config: RoundConfig, plan: Plan, round_bytes: Sequence[int]) -> None:
        self._config, self._round_bytes = config, round_bytes
        self._told = plan.shared_momentum  # the train side uses the means
        self.awaited = self._told and plan.overlap_steps == 0
        self._met: dict[int, Group] = {}  # by fragment, with whom the last round was held
        self._s_per_byte = 0.0

    def arrived(self, size_bytes: int, took_s: float) -> None:
        """Counts slow arrivals half as much each time: the next link may be as slow."""
        if size_bytes > 0:
            self._s_per_byte = max(took_s / size_bytes, self._s_per_byte / 2)

    def lead_s(self, fragment: int) -> float:
        """How far peers may be behind that this one has not exchanged with: as long as a round
        takes, at first on the slowest link that is planned for."""
        size_bytes = self._round_bytes[fragment]
        if self._s_per_byte == 0.0:
            return self._config.transfer_s(size_bytes)
        return size_bytes * self._s_per_byte

    def laid(self, round_: PairRound, members: int) -> bool:
        """Tells whether the train side may go on alone, or where all are one group."""
        one = len(round_.group) == members and self._met.get(round_.fragment) == round_.group
        return (len(round_.group) == 1 or one) and self._goes_without(round_)

    def ended(self, round_: PairRound) -> None:
        self._met[round_.fragment] = round_.group if round_.succeeded else ()

    def came(self, round_: PairRound) -> bool:
        """Says whether the anchors' mean is to be told now that a partner's anchor is here."""
        if not self._told or round_.told or round_.begun:
            return False
        anchors = [partner.parts.get(ANCHOR) for partner in round_.partners.values()]
        round_.told = all(anchor is not None and anchor.checked for anchor in anchors)
        return round_.told

    def overdue(self, round_: PairRound, now: float) -> bool:
        """Tells whether the train side may go on by now: a silent partner is not waited for."""
        return self._awaits(round_) and now >= self._until(round_) and self._goes_without(round_)

    def due_at(self, round_: PairRound) -> float | None:
        return self._until(round_) if self._awaits(round_) else None

    def _until(self, round_: PairRound) -> float:
        quiet_s, slowest_s = _QUIET_S, self._config.transfer_s(len(round_.own[ANCHOR].payload.raw))
        if len(self._met.get(round_.fragment, round_.group)) < 2:  # the others are exchanging
            quiet_s += self.lead_s(round_.fragment)
        return min(max(round_.laid, round_.heard) + quiet_s, round_.laid + (quiet_s + slowest_s))

    def _awaits(self, round_: PairRound) -> bool:
        return self.awaited and not round_.begun and not (round_.told or round_.let_go)

    def _goes_without(self, round_: PairRound) -> bool:
        """Notes it; returns whether the train side is to hear of it."""
        if not self._awaits(round_):
            return False
        round_.let_go = True
        return True
