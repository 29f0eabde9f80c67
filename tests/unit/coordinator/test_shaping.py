"""The relay's decisions, on a virtual clock."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.link import Link
from murmuration.coordinator.shaping_proxy import (
    BURST_S,
    Bucket,
    LinkedPeer,
    ShapedPipe,
)

RATE = 250_000.0  # bytes a second: 2 Mbit/s


def member(name: str, **link: float) -> LinkedPeer:
    return LinkedPeer(name, Link(**{"rate_mbps": 2, **link}))


@given(st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 2)), min_size=1, max_size=50))
def test_never_more_than_the_rate_and_a_burst_passes(chunks: list[tuple[int, float]]) -> None:
    bucket, now, passed = Bucket(RATE), 0.0, []
    for n_bytes, pause_s in chunks:
        now += pause_s
        passed.append((max(now, bucket.take(n_bytes, now)), n_bytes))
    for first in range(len(passed)):
        total = 0
        for when, n_bytes in passed[first:]:
            total += n_bytes
            # The first of them may have passed in part before.
            span_s = when - passed[first][0] + passed[first][1] / RATE
            assert total <= RATE * (span_s + BURST_S) * (1 + 1e-9)


def test_connections_of_one_worker_share_its_link_both_ways_apart() -> None:
    w0, w1, w2 = (member(f"w{i}") for i in range(3))
    chance = random.Random(0)
    ahead, other = ShapedPipe(w0, w1, chance), ShapedPipe(w0, w2, chance)
    back = ShapedPipe(w1, w0, chance)
    n = round(RATE)  # a second's worth
    assert ahead.enter(n, 0.0)[0] == pytest.approx(1 - BURST_S)
    assert other.enter(n, 0.0)[0] == pytest.approx(2 - BURST_S)  # behind it, on w0's way up
    assert back.enter(n, 0.0)[0] == pytest.approx(1 - BURST_S)
    assert ShapedPipe(w1, w2, chance).enter(n, 0.0)[0] == pytest.approx(2 - BURST_S)
    assert (w0.sent_bytes, w0.received_bytes) == (2 * n, n)
    assert (w2.sent_bytes, w2.received_bytes) == (0, 2 * n)


def test_what_is_under_way_is_what_fits_on_the_link() -> None:
    pipe = ShapedPipe(
        member("w0", delay_s=0.2, jitter_s=0.05), LinkedPeer("far", None), random.Random(0)
    )
    held = 0
    while not pipe.full:
        pipe.enter(1000, 0.0)
        held += 1000
    assert RATE * 0.25 <= held <= RATE * 0.25 + 5 * pipe.chunk_bytes
    pipe.leave(20_000)
    assert not pipe.full
