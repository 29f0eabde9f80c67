"""How far a peer may be ahead of its partners in small groups, though all are equally fast.

Who sits a round out, or has lost it, has computed on while the others exchanged, and comes that
much earlier to its next round.
"""

from worker.exchange.types import RoundConfig


class Lead:
    """By how long values of partners have lately taken to arrive here."""

    def __init__(self, config: RoundConfig) -> None:
        self._s_per_byte = 0.0
        self._config = config

    def came(self, size_bytes: int, took_s: float) -> None:
        """So many bytes of a partner's have arrived one after the other. What was slow counts half
        as much with each that follows: the next pair's link may be as slow again."""
        if size_bytes > 0:
            self._s_per_byte = max(took_s / size_bytes, self._s_per_byte / 2)

    def lead_s(self, payload_bytes: int) -> float:
        """What a round takes in which everybody gives a partner so many bytes; on the slowest link
        that is planned for, as long as nothing has come."""
        if self._s_per_byte == 0.0:
            return self._config.transfer_s(payload_bytes)
        return payload_bytes * self._s_per_byte
