"""The gain of zstd by a clock of the test, the time of what comes from one peer, and the bits per
value that travelled."""

import time

import pytest
import torch

from murmuration.algorithms.codecs import CODECS, codec_by_name
from murmuration.worker import wire
from murmuration.worker.exchange.measured import Arrivals, Compression, ExchangeConfig
from murmuration.worker.exchange.round_context import Flow
from murmuration.worker.wire import Payload
from tests.support.fake_clock import FakeClock

E3M0 = codec_by_name("e3m0")
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


def compression(takes_s: float = 1.0) -> tuple[Compression, Clock]:
    clock = Clock(takes_s)
    return Compression(ExchangeConfig(), clock), clock


def compresses(each: Compression) -> bool:
    return bool(each.payload(E3M0, RAW).packed)


def link_of(each: Compression, bytes_per_s: float) -> None:
    each.exchanged(int(bytes_per_s), 1.0)


@pytest.mark.parametrize(("margin", "pays"), [(2.1, True), (1.9, False)])
def test_it_pays_while_the_link_takes_longer_than_a_core(margin, pays):
    """Twice as long as compressing takes: the other side must decompress."""
    each, _ = compression(takes_s=1.0)
    assert compresses(each)
    link_of(each, SAVED_BYTES / margin)  # to send what is saved takes `margin` seconds
    assert compresses(each) is pays


def test_what_did_not_pay_is_tried_again_after_32_payloads():
    each, clock = compression(takes_s=1.0)
    assert compresses(each)
    link_of(each, SAVED_BYTES * 100)
    assert [compresses(each) for _ in range(64)] == ([False] * 31 + [True]) * 2
    clock.takes_s = 1e-9  # the core is free again
    assert [compresses(each) for _ in range(32)] == [False] * 31 + [True]
    assert [compresses(each) for _ in range(5)] == [True] * 5


def test_a_thread_that_is_held_up_does_not_take_compressing_for_slow(monkeypatch):
    """Time that passes while others have the core, or the GIL, is no time of this thread."""
    monkeypatch.setattr(time, "thread_time", Clock(takes_s=1e-9))
    monkeypatch.setattr(time, "perf_counter", Clock(takes_s=1.0))
    monkeypatch.setattr(time, "monotonic", Clock(takes_s=1.0))
    each = Compression(ExchangeConfig())
    link_of(each, SAVED_BYTES)
    assert [compresses(each) for _ in range(5)] == [True] * 5


def test_an_empty_shard_is_a_payload_and_measures_nothing():
    each, _ = compression()
    assert each.payload(E3M0, memoryview(b"")).raw == b""
    link_of(each, 1e12)
    assert not compresses(each)  # a sample of the next one told
    with pytest.raises(ValueError, match=r"^compression is 'zip'; use one of auto, always, never$"):
        ExchangeConfig(compression="zip")


def test_payloads_at_a_time_share_their_seconds():
    clock = FakeClock()
    arrivals = Arrivals(clock)
    with arrivals.payload() as first, arrivals.payload() as second:
        first.begins("a")
        clock.now_s = 1.0
        second.begins("a")
        first.came(100)
        clock.now_s = 3.0
        second.came(50)
        first.came(50)
    assert arrivals.taken() == {"a": (200, pytest.approx(3.0))}
    assert arrivals.taken() == {}


def test_time_between_payloads_and_before_their_announcement_does_not_count():
    clock = FakeClock()
    arrivals = Arrivals(clock)
    for began_s in (10.0, 20.0):
        with arrivals.payload() as payload:
            clock.now_s = began_s
            payload.begins("a")
            payload.begins("a")  # its second header says nothing new
            clock.now_s = began_s + 2.0
            payload.came(1000)
            clock.now_s = began_s + 5.0  # nothing came of it any more
    assert arrivals.taken() == {"a": (2000, pytest.approx(4.0))}


def test_what_may_have_lain_here_is_not_measured_and_others_are_told_apart():
    clock = FakeClock()
    arrivals = Arrivals(clock)
    with arrivals.payload() as held, arrivals.payload() as other:
        held.came(1000)  # that it begins was never said
        other.begins("b")
        clock.now_s = 1.0
        other.came(10)
        assert arrivals.taken() == {"b": (10, pytest.approx(1.0))}
        clock.now_s = 2.0
        other.came(20)
    assert arrivals.taken() == {"b": (20, pytest.approx(1.0))}


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encoded_bytes_stand_for_values_however_few_travelled(codec):
    values = 1 << 20  # whole blocks of any codec
    flow, size = Flow(), codec.encoded_bytes(values)
    flow.add(size // 2, size // 2, codec)
    flow.add(0, size - size // 2, codec)
    assert flow.values == pytest.approx(values)
    assert (flow.encoded_bytes, flow.payload_bytes) == (size, size // 2)
