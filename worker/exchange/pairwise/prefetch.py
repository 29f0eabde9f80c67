"""What lies between two pair rounds: how far partners are apart, and anchors that come ahead."""

from collections.abc import Sequence

from murmuration.worker.exchange.pairwise.buffer import ANCHOR, Group, PairBuffer
from murmuration.worker.exchange.view import RoundConfig

_QUIET_S = 1.0  # several delays of a long link pass before the first byte


class ArrivalSkew:
    """By how long values of partners have lately taken to arrive here."""

    def __init__(self, config: RoundConfig) -> None:
        self._s_per_byte = 0.0
        self._config = config

    def came(self, size_bytes: int, took_s: float) -> None:
        """Bytes of a partner's have arrived one after the other. What was slow counts half as much
        with each that follows: the next pair's link may be as slow again."""
        if size_bytes > 0:
            self._s_per_byte = max(took_s / size_bytes, self._s_per_byte / 2)

    def lead_s(self, payload_bytes: int) -> float:
        """What a round takes in which everybody gives a partner this many bytes. As long as nothing
        has come, the slowest link that is planned for is assumed."""
        if self._s_per_byte == 0.0:
            return self._config.transfer_s(payload_bytes)
        return payload_bytes * self._s_per_byte


class AnchorPrefetch:
    """When the train side hears of the mean of its group's anchors before a round.

    The mean is told as soon as it is known. In plans without overlap the train side waits for it;
    there it is told as well when it may go on without, and a later mean is told all the same.

    Args:
        config: closing rules.
        skew: how long partners may still be exchanging that this peer has not exchanged with.
        round_bytes: by fragment, what a peer gives each partner.
        told: whether the train side uses anchors' means.
        awaited: whether it waits for them.
    """

    def __init__(
        self,
        config: RoundConfig,
        skew: ArrivalSkew,
        round_bytes: Sequence[int],
        *,
        told: bool,
        awaited: bool,
    ) -> None:
        self._config, self._skew, self._round_bytes = config, skew, round_bytes
        self._told, self.awaited = told, told and awaited
        self._met: dict[int, Group] = {}  # by fragment, with whom the last round was held

    def laid(self, buffer: PairBuffer, members: int) -> bool:
        """Whether the train side may go on without, of a round to come in a swarm of that size. A
        peer that sits out waits for nobody, and where all are one group they have one anchor."""
        one = len(buffer.group) == members and self._met.get(buffer.fragment) == buffer.group
        return (len(buffer.group) == 1 or one) and self._goes_without(buffer)

    def ended(self, buffer: PairBuffer) -> None:
        """A round is over."""
        self._met[buffer.fragment] = buffer.group if buffer.succeeded else ()

    def came(self, buffer: PairBuffer, me: str) -> bool:
        """Whether the anchors' mean is to be told, now that a partner's anchor is here."""
        early = self._told and not buffer.told and buffer.machine is None
        if early and buffer.holds_anchors(me):
            buffer.told = True
            return True
        return False

    def overdue(self, buffer: PairBuffer, now: float) -> bool:
        """Whether the train side may go on without, as time passes: a partner of which nothing
        comes is not waited for, and one of which little comes not for ever."""
        return self._awaits(buffer) and now >= self._until(buffer) and self._goes_without(buffer)

    def due_at(self, buffer: PairBuffer) -> float | None:
        """From which time on `overdue` may hold; None if never."""
        return self._until(buffer) if self._awaits(buffer) else None

    def _until(self, buffer: PairBuffer) -> float:
        quiet_s = _QUIET_S
        slowest_s = self._config.transfer_s(len(buffer.own[ANCHOR].raw))
        if len(self._met.get(buffer.fragment, buffer.group)) < 2:  # the others are exchanging
            quiet_s += self._skew.lead_s(self._round_bytes[buffer.fragment])
        return min(max(buffer.laid, buffer.heard) + quiet_s, buffer.laid + (quiet_s + slowest_s))

    def _awaits(self, buffer: PairBuffer) -> bool:
        waits = buffer.machine is None and not (buffer.told or buffer.let_go)
        return self.awaited and waits

    def _goes_without(self, buffer: PairBuffer) -> bool:
        """Notes it; returns whether the train side is to hear of it."""
        if not self._awaits(buffer):
            return False
        buffer.let_go = True
        return True
