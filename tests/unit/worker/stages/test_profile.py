"""What a peer tells of its links and its stage: rounded, seldom, and read with suspicion."""

import msgpack
import pytest

from worker.stages.profile import Measuring, Profile, visit_held

FULL = Profile(
    latency_s={"b": 0.01},
    rate_bytes_per_s={"b": 1e6, "c": 2e6},
    forward_s=0.02,
    backward_s=0.05,
    loss_s=0.005,
    visit_bytes=4096,
    memory=7,
)


def test_a_profile_comes_back_as_it_was() -> None:
    assert Profile.unpack(FULL.pack()) == FULL
    assert Profile.unpack(b"") == Profile()


@pytest.mark.parametrize(
    "raw",
    [
        b"\xc1",
        FULL.pack()[:-3],
        msgpack.packb([1, 2]),
        msgpack.packb({"forward_s": "fast"}),
        msgpack.packb({"forward_s": -1.0}),
        msgpack.packb({"memory": float("inf")}),
        msgpack.packb({"latency_s": [1.0]}),
        msgpack.packb({"latency_s": {"b": float("nan")}}),
    ],
)
def test_nonsense_is_an_empty_profile(raw: bytes) -> None:
    assert Profile.unpack(raw) == Profile()


def test_a_latency_is_half_of_the_shortest_round_trip() -> None:
    measuring = Measuring(1000)
    for seconds in (0.5, 0.2, 0.9):
        measuring.round_trip("b", seconds)
    news = measuring.news(0.0)
    assert news is not None
    assert news.latency_s == {"b": 0.1}


def test_memory_is_how_many_visits_fit_and_at_least_one() -> None:
    measuring = Measuring(1000)
    measuring.visit_bytes(100)
    news = measuring.news(0.0)
    assert news is not None
    assert (news.visit_bytes, news.memory) == (100, 1000 // visit_held(100))
    measuring.visit_bytes(10_000)
    news = measuring.news(60.0)
    assert news is not None
    assert news.memory == 1


def test_small_changes_are_no_news() -> None:
    measuring = Measuring(1000)
    assert measuring.news(0.0) is None  # nothing is known
    measuring.computed("forward_s", 1.0)
    assert measuring.news(1.0) is not None
    measuring.computed("forward_s", 1.5)  # counts a fifth: 1.1 s
    assert measuring.news(60.0) is None
    measuring.computed("forward_s", 3.0)  # 1.48 s
    news = measuring.news(120.0)
    assert news is not None
    assert news.forward_s == 1.5


def test_a_rate_is_among_the_best_and_without_the_way_of_the_answer() -> None:
    measuring = Measuring(1000)
    measuring.round_trip("b", 0.5)
    for seconds in (1.0, 1.5, 2.5, 3.5, 4.5, 10.5):
        measuring.sent("b", 1_000_000, seconds)
    news = measuring.news(0.0)
    assert news is not None
    assert news.rate_bytes_per_s["b"] == 1_000_000
