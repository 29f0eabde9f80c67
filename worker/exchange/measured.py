"""What rounds measure of the links: how fast payloads come in, and whether zstd on them pays.

Entropy coding takes a tenth off quantized values of a bell-shaped distribution, and a fifth off
fp32 when the exponents lie together. It pays as long as the link takes longer for the bytes saved
than a core takes to save them.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from murmuration.algorithms.codecs import Codec
from murmuration.worker.wire import MAX_FRAME_BYTES, Payload


@dataclass
class _FromPeer:
    """Args: under_way: payloads that are coming; at_s: up to when their time is counted."""

    under_way: int = 0
    at_s: float = 0.0
    payload_bytes: int = 0
    seconds: float = 0.0


class Arrivals:
    """Of one peer, from all others. io thread only.

    Args: clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._from: dict[str, _FromPeer] = {}

    def payload(self) -> "Arrival":
        """One that is to come; use it as a context manager, so that it ends."""
        return Arrival(self)

    def of(self, peer: str) -> _FromPeer:
        return self._from.setdefault(peer, _FromPeer())

    def taken(self) -> dict[str, tuple[int, float]]:
        """(bytes, seconds) by sender, since this was last asked; of what has come only."""
        found = {
            peer: (each.payload_bytes, each.seconds)
            for peer, each in self._from.items()
            if each.payload_bytes
        }
        self._from = {peer: each for peer, each in self._from.items() if each.under_way}
        for each in self._from.values():
            each.payload_bytes, each.seconds = 0, 0.0
        return found


class Arrival:
    """One payload on its way; nothing of it counts before its sender gives it. io thread only."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._from: _FromPeer | None = None

    def begins(self, peer: str) -> None:
        """Its sender gives it from now on."""
        if self._from is None:
            each = self._from = self._arrivals.of(peer)
            if not each.under_way:
                each.at_s = self._arrivals.clock()
            each.under_way += 1

    def came(self, payload_bytes: int) -> None:
        """A frame is here."""
        if (each := self._from) is not None:
            now = self._arrivals.clock()
            each.payload_bytes += payload_bytes
            each.seconds += now - each.at_s
            each.at_s = now

    def __enter__(self) -> "Arrival":
        return self

    def __exit__(self, *_: object) -> None:
        """All of it is here, or nothing more comes."""
        if self._from is not None:
            self._from.under_way -= 1
            self._from = None


_TRY_AGAIN = 32  # payloads, after which a codec that did not pay is measured again
_REMEMBERED_ROUNDS = 16
_DECOMPRESSION = 2.0  # compressing and decompressing, and neither while sending


@dataclass
class _Measured:
    """Of one codec: share of the bytes saved, and seconds of a core that each byte took."""

    saved: float
    s_per_byte: float
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """Args: compression: `auto` measures whether zstd pays, `always` or `never` do not ask."""

    compression: str = "auto"

    def __post_init__(self) -> None:
        if self.compression not in ("auto", "always", "never"):
            raise ValueError(f"compression is {self.compression!r}; use one of auto, always, never")


class Compression:
    """Makes payloads, compressed where that pays. `payload` runs off the loop, the rest on it.

    The clock is the thread's own CPU time: a thread that had to wait for the GIL or for a core
    would take compressing for slow, and give it up for many rounds.
    """

    def __init__(self, config: ExchangeConfig, clock: Callable[[], float] | None = None) -> None:
        self._mode, self._clock = config.compression, clock or time.thread_time
        self._measured: dict[str, _Measured] = {}
        self._rates: deque[float] = deque(maxlen=_REMEMBERED_ROUNDS)

    def payload(self, codec: Codec, raw: memoryview) -> Payload:
        """The encoded bytes, ready to be sent."""
        if self._mode == "auto" and codec.name not in self._measured:
            self._compressed(codec, raw[:MAX_FRAME_BYTES])
        return self._compressed(codec, raw) if self._tries(codec, len(raw)) else Payload.of(raw)

    def exchanged(self, sent_bytes: int, took_s: float) -> None:
        """A round has moved this many bytes up; the link carries at least that."""
        if took_s > 0 and sent_bytes > 0:
            self._rates.append(sent_bytes / took_s)

    def _compressed(self, codec: Codec, raw: memoryview) -> Payload:
        """Measures what it comes to."""
        began = self._clock()
        payload = Payload.of(raw, compress=True, unit_bytes=codec.unit_bytes)
        if len(raw):
            took_s = self._clock() - began
            saved = 1 - payload.packed_bytes / len(raw)
            self._measured[codec.name] = _Measured(saved, took_s / len(raw))
        return payload

    def _tries(self, codec: Codec, size_bytes: int) -> bool:
        if self._mode != "auto":
            return self._mode == "always"
        known = self._measured.get(codec.name)
        if known is None or not self._rates:  # nothing is known of the link yet
            return size_bytes <= MAX_FRAME_BYTES
        saves_s = known.saved / max(self._rates)
        if saves_s > known.s_per_byte * _DECOMPRESSION:
            return True
        known.since += 1
        return known.since % _TRY_AGAIN == 0
