"""Whether zstd on top of a payload pays here: decided by measuring.

Entropy coding takes a tenth off quantized values of a bell-shaped distribution, and a fifth off
fp32 when the exponents lie together. It pays as long as the link takes longer for the bytes saved
than a core takes to save them.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from murmuration.algorithms.codecs import Codec
from murmuration.worker.exchange.types import ExchangeConfig
from murmuration.worker.wire import MAX_FRAME_BYTES, Payload

_TRY_AGAIN = 32  # payloads, after which a codec that did not pay is measured again
_REMEMBERED_ROUNDS = 16
_DECOMPRESSION = 2.0  # compressing and decompressing, and neither while sending


@dataclass
class _Measured:
    """Of one codec: share of the bytes saved, and seconds of a core that each byte took."""

    saved: float
    s_per_byte: float
    since: int = 0


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
