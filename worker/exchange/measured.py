"""Measures links in rounds: how fast payloads come in, and whether zstd on them pays.

Entropy coding takes a tenth off quantized values of a bell-shaped distribution, and a fifth off
fp32 when the exponents lie together. It pays as long as the link takes longer for the bytes saved
than a core takes to save them.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from murmuration.algorithms.codecs import Codec
from murmuration.worker.wire import MAX_FRAME_BYTES, Payload


@dataclass
class _FromPeer:
    under_way: int = 0  # payloads that are coming
    at_s: float = 0.0  # up to when their time is counted
    payload_bytes: int = 0
    seconds: float = 0.0


class Arrivals:
    """The payloads that come to one peer from all others. io thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.senders: dict[str, _FromPeer] = {}

    def payload(self) -> "Arrival":
        """Returns a payload that is to come, as a context manager, so that it ends."""
        return Arrival(self)

    def taken(self) -> dict[str, tuple[int, float]]:
        """(bytes, seconds) by sender, since this was last asked; of what has come only."""
        found = {p: (e.payload_bytes, e.seconds) for p, e in self.senders.items()}
        self.senders = {peer: each for peer, each in self.senders.items() if each.under_way}
        for each in self.senders.values():
            each.payload_bytes, each.seconds = 0, 0.0
        return {peer: came for peer, came in found.items() if came[0]}


class Arrival(AbstractContextManager["Arrival"]):
    """One payload on its way; nothing of it counts before its sender gives it. io thread only."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._from: _FromPeer | None = None

    def begins(self, peer: str) -> None:
        """Its sender gives it from now on."""
        if self._from is None:
            each = self._from = self._arrivals.senders.setdefault(peer, _FromPeer())
            if not each.under_way:
                each.at_s = self._arrivals.clock()
            each.under_way += 1

    def came(self, payload_bytes: int) -> None:
        if (each := self._from) is not None:
            now = self._arrivals.clock()
            each.payload_bytes += payload_bytes
            each.seconds += now - each.at_s
            each.at_s = now

    def __exit__(self, *_: object) -> None:
        if self._from is not None:
            self._from.under_way -= 1
            self._from = None


_TRY_AGAIN = 32  # payloads, after which a codec that did not pay is measured again
_REMEMBERED_ROUNDS = 16
_DECOMPRESSION = 2.0  # compressing and decompressing, and neither while sending


@dataclass
class _Measured:
    """The gain and cost of zstd for a codec: share of bytes saved, seconds of a core a byte."""

    saved: float
    s_per_byte: float
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    compression: str = "auto"  # measures whether zstd pays; `always` or `never` do not ask

    def __post_init__(self) -> None:
        if self.compression not in ("auto", "always", "never"):
            raise ValueError(f"compression is {self.compression!r}; use one of auto, always, never")


class Compression:
    """Makes payloads, compressed where that pays. `payload` runs off the loop, the rest on it. The
    clock is the thread's own CPU time: waiting for the GIL or a core would make compressing seem
    slow."""

    def __init__(self, config: ExchangeConfig, clock: Callable[[], float] | None = None) -> None:
        self._mode, self._clock = config.compression, clock or time.thread_time
        self._measured: dict[str, _Measured] = {}
        self._rates: deque[float] = deque(maxlen=_REMEMBERED_ROUNDS)

    def payload(self, codec: Codec, raw: memoryview) -> Payload:
        if self._mode == "auto" and codec.name not in self._measured:
            self._compressed(codec, raw[:MAX_FRAME_BYTES])
        return self._compressed(codec, raw) if self._tries(codec, len(raw)) else Payload.of(raw)

    def exchanged(self, sent_bytes: int, took_s: float) -> None:
        """A round has moved this many bytes up; the link carries at least that."""
        if took_s > 0 and sent_bytes > 0:
            self._rates.append(sent_bytes / took_s)

    def _compressed(self, codec: Codec, raw: memoryview) -> Payload:
        began = self._clock()
        payload = Payload.of(raw, compress=True, unit_bytes=codec.unit_bytes)
        if len(raw):
            took_s, saved = self._clock() - began, 1 - payload.packed_bytes / len(raw)
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
