"""Whether zstd pays, decided by a clock that the test holds."""

import time

import pytest
import torch

from murmuration.algorithms.codecs import codec_by_name
from murmuration.worker import wire
from murmuration.worker.exchange.measured import Compression, ExchangeConfig
from murmuration.worker.wire import Payload

E3M0, FP32, BF16 = (codec_by_name(name) for name in ("e3m0", "fp32", "bf16"))
VALUES = torch.randn(64 * 500, generator=torch.Generator().manual_seed(0)) ** 3
RAW = wire.encode(E3M0, VALUES)
SAVED_BYTES = len(RAW) - Payload.of(RAW, compress=True).packed_bytes


class Clock:
    """Compressing takes `takes_s`: the clock moves on between the two times it is asked."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s, self.now, self.asked = takes_s, 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        if self.asked % 2 == 0:
            self.now += self.takes_s
        return self.now


def compression(mode: str = "auto", takes_s: float = 1.0) -> tuple[Compression, Clock]:
    clock = Clock(takes_s)
    return Compression(ExchangeConfig(compression=mode), clock), clock


def compresses(each: Compression, codec_name: str = "e3m0") -> bool:
    return bool(each.payload(codec_by_name(codec_name), RAW).packed)


def link_of(each: Compression, bytes_per_s: float) -> None:
    each.exchanged(int(bytes_per_s), 1.0)


@pytest.mark.parametrize(("margin", "pays"), [(2.1, True), (1.9, False)])
def test_it_pays_while_the_link_takes_longer_than_a_core(margin: float, pays: bool) -> None:
    """Twice as long as compressing takes: the other side must decompress."""
    each, _ = compression(takes_s=1.0)
    assert compresses(each)
    link_of(each, SAVED_BYTES / margin)  # to send what is saved takes `margin` seconds
    assert compresses(each) is pays


def test_the_fastest_of_the_last_sixteen_rounds_tells_what_the_link_carries() -> None:
    slow, fast = SAVED_BYTES / 100, SAVED_BYTES * 100
    each, _ = compression()
    compresses(each)
    link_of(each, fast)
    for _ in range(15):
        link_of(each, slow)
    assert not compresses(each)
    link_of(each, slow)
    assert compresses(each)


def test_what_did_not_pay_is_tried_again_after_32_payloads() -> None:
    each, clock = compression(takes_s=1.0)
    assert compresses(each)
    link_of(each, SAVED_BYTES * 100)
    assert [compresses(each) for _ in range(64)] == ([False] * 31 + [True]) * 2
    clock.takes_s = 1e-9  # the core is free again
    assert [compresses(each) for _ in range(32)] == [False] * 31 + [True]
    assert [compresses(each) for _ in range(5)] == [True] * 5


def test_while_the_link_is_unknown_only_small_payloads_are_tried() -> None:
    each, _ = compression()
    large = memoryview(bytes(2 * wire.MAX_FRAME_BYTES))
    assert not each.payload(E3M0, large).packed
    assert compresses(each)
    link_of(each, 1.0)
    assert each.payload(E3M0, large).packed


def test_a_thread_that_is_held_up_does_not_take_compressing_for_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time that passes while others have the core, or the GIL, is no time of this thread."""
    monkeypatch.setattr(time, "thread_time", Clock(takes_s=1e-9))
    monkeypatch.setattr(time, "perf_counter", Clock(takes_s=1.0))
    monkeypatch.setattr(time, "monotonic", Clock(takes_s=1.0))
    each = Compression(ExchangeConfig())
    link_of(each, SAVED_BYTES)
    assert [compresses(each) for _ in range(5)] == [True] * 5


def test_an_empty_shard_is_a_payload_and_measures_nothing() -> None:
    each, _ = compression()
    assert each.payload(E3M0, memoryview(b"")).raw == b""
    link_of(each, 1e12)
    assert not compresses(each)  # a sample of the next one told


def test_an_unknown_mode_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"^compression is 'zip'; use one of auto, always, never$"):
        ExchangeConfig(compression="zip")
