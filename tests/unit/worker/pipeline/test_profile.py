"""What a peer tells of its links and its stage: rounded, seldom, and read with suspicion."""

import msgpack
import pytest

from worker.pipeline.profile import Measuring, Profile, visit_held

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


def test_no_peer_has_memory_for_more_visits_than_there_are() -> None:
    assert Profile.unpack(msgpack.packb({"memory": 2**63})).memory == 1_000_000


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


class Clock:
    """Says what time it is made to be."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rates(measuring: Measuring, now_s: float) -> dict[str, float]:
    news = measuring.news(now_s)
    assert news is not None
    return dict(news.rate_bytes_per_s)


def test_what_is_sent_before_any_round_trip_tells_no_rate() -> None:
    """Most of the second may be the way there and back."""
    measuring = Measuring(1000, Clock())
    measuring.sent("b", 1_000_000, 1.0)
    assert measuring.measured_at("b") is None
    assert measuring.news(0.0) is None
    measuring.round_trip("b", 0.9)
    measuring.sent("b", 1_000_000, 1.0)
    assert measuring.measured_at("b") == 0.0
    assert rates(measuring, 0.0)["b"] == 1e7


def test_of_a_few_rates_the_best_counts_until_it_is_old() -> None:
    """A probe that shared the link with others is no news; a link that has become slow is."""
    clock = Clock()
    measuring = Measuring(1000, clock)
    for clock.now_s, seconds in ((0.0, 1.1), (300.0, 2.1), (600.0, 2.1)):
        measuring.round_trip("b", 0.1)
        measuring.sent("b", 1_000_000, seconds)
    assert rates(measuring, 600.0)["b"] == 1e6
    assert measuring.measured_at("b") == 600.0
    clock.now_s = 901.0
    measuring.sent("b", 1_000_000, 2.1)
    assert rates(measuring, 901.0)["b"] == 5e5


def test_messages_alone_on_their_way_tell_so() -> None:
    measuring = Measuring(1000)
    with measuring.transfer() as first:
        assert first.alone
        with measuring.transfer() as second:
            pass
    with measuring.transfer() as third:
        pass
    assert [transfer.alone for transfer in (first, second, third)] == [False, False, True]


def test_rates_of_messages_that_shared_the_uplink_count_while_few_had_it_alone() -> None:
    measuring = Measuring(1000, Clock())
    measuring.round_trip("b", 0.1)
    for seconds, alone in [(2.1, False)] * 20 + [(1.1, True)] * 4:
        measuring.sent("b", 1_000_000, seconds, alone=alone)
    assert rates(measuring, 0.0)["b"] == 5e5
    measuring.sent("b", 1_000_000, 1.1, alone=True)
    assert rates(measuring, 2.0)["b"] == 1e6


def test_a_link_that_is_measured_no_more_is_forgotten_and_that_is_news() -> None:
    clock = Clock()
    measuring = Measuring(1000, clock)
    measuring.present({"b": 1, "c": 1})
    for peer in "bc":
        measuring.round_trip(peer, 0.1)
        measuring.sent(peer, 1000, 0.2)
    assert rates(measuring, 0.0).keys() == {"b", "c"}
    for clock.now_s in (600.0, 1200.0):
        measuring.round_trip("b", 0.1)
        measuring.sent("b", 1000, 0.2)
    news = measuring.news(1200.0)
    assert news is not None
    assert news.latency_s.keys() == news.rate_bytes_per_s.keys() == {"b"}
    assert measuring.measured_at("c") is None
    assert measuring.news(1300.0) is None


def test_who_is_gone_or_has_started_again_is_not_remembered() -> None:
    measuring = Measuring(1000, Clock())
    measuring.present({"b": 1, "c": 1, "d": 1})
    for peer in "bcd":
        measuring.round_trip(peer, 0.1)
        measuring.sent(peer, 1000, 0.2)
    measuring.present({"b": 1, "c": 2})
    news = measuring.news(0.0)
    assert news is not None
    assert news.latency_s.keys() == news.rate_bytes_per_s.keys() == {"b"}
    assert measuring.measured_at("c") is None


def test_visits_per_second_are_known_once_both_ways_are_measured() -> None:
    assert FULL.visits_per_s == pytest.approx(1 / 0.075)
    assert Profile(forward_s=0.02).visits_per_s == 0.0


def test_a_rate_is_among_the_best_and_without_the_way_of_the_answer() -> None:
    measuring = Measuring(1000)
    measuring.round_trip("b", 0.5)
    for seconds in (1.0, 1.5, 2.5, 3.5, 4.5, 10.5):
        measuring.sent("b", 1_000_000, seconds)
    news = measuring.news(0.0)
    assert news is not None
    assert news.rate_bytes_per_s["b"] == 1_000_000
