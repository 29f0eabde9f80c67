"""A peer's measurements of its links and its stage: rounded, seldom, and read with suspicion; and
which link it measures when."""

from dataclasses import replace

import msgpack

from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.profile import LinkProber, Profile, StageMeasurements
from tests.support.fake_clock import FakeClock
from tests.unit.worker.pipeline.members import members_of

LINKS = {"latency_s": {"b": 0.01}, "rate_bytes_per_s": {"b": 1e6, "c": 2e6}}
TIMES = {"forward_s": 0.02, "backward_s": 0.05, "loss_s": 0.005}
FULL = Profile(**LINKS, **TIMES, activation_bytes=4096, memory=7)


def test_a_profile_comes_back_as_it_was_and_nonsense_is_an_empty_one():
    assert Profile.unpack(FULL.pack()) == FULL
    assert Profile.unpack(b"") == Profile()
    for raw in [
        b"\xc1",
        FULL.pack()[:-3],
        msgpack.packb([1, 2]),
        msgpack.packb({"forward_s": "fast"}),
        msgpack.packb({"forward_s": -1.0}),
        msgpack.packb({"memory": float("inf")}),
        msgpack.packb({"latency_s": [1.0]}),
        msgpack.packb({"latency_s": {"b": float("nan")}}),
    ]:
        assert Profile.unpack(raw) == Profile()


def test_a_figure_that_cannot_be_is_capped():
    """All of a profile are finite, and so are sums and ratios of theirs."""
    told = {"gradient_norm": 1.7e308, "forward_s": 5e-324, "backward_s": 1e-300, "loss_s": 1e308}
    lists = {"latency_s": {"b": 1e300}, "rate_bytes_per_s": {"b": 5e-324}}
    profile = Profile.unpack(msgpack.packb({**told, **lists, "activation_bytes": 2**63}))
    capped = {"latency_s": {"b": 1e12}, "rate_bytes_per_s": {"b": 0.0}, "activation_bytes": 10**12}
    assert profile == Profile(**capped, gradient_norm=1e12, loss_s=1e12)


def news_at(measurements: StageMeasurements, now_s: float) -> Profile:
    news = measurements.poll(now_s)
    assert news is not None
    return news


def rates(measurements: StageMeasurements, now_s: float) -> dict[str, float]:
    return dict(news_at(measurements, now_s).rate_bytes_per_s)


def test_what_is_sent_before_any_round_trip_tells_no_rate():
    """Most of the second may be the way there and back."""
    measurements = StageMeasurements(1000, FakeClock())
    measurements.sent("b", 1_000_000, 1.0)
    assert measurements.measured_at("b") is None
    assert measurements.poll(0.0) is None
    measurements.round_trip("b", 0.9)
    measurements.sent("b", 1_000_000, 1.0)
    assert measurements.measured_at("b") == 0.0
    assert rates(measurements, 0.0)["b"] == 1e7


def test_of_a_few_rates_the_best_counts_until_it_is_old():
    """A probe that shared the link with others is no news; a link that has become slow is."""
    clock = FakeClock()
    measurements = StageMeasurements(1000, clock)
    for clock.now_s, seconds in ((0.0, 1.1), (300.0, 2.1), (600.0, 2.1)):
        measurements.round_trip("b", 0.1)
        measurements.sent("b", 1_000_000, seconds)
    assert rates(measurements, 600.0)["b"] == 1e6
    assert measurements.measured_at("b") == 600.0
    clock.now_s = 901.0
    measurements.sent("b", 1_000_000, 2.1)
    assert rates(measurements, 901.0)["b"] == 5e5


def test_a_link_that_is_measured_no_more_is_forgotten_and_that_is_news():
    clock = FakeClock()
    measurements = StageMeasurements(1000, clock)
    measurements.on_view({"b": 1, "c": 1})
    for peer in "bc":
        measurements.round_trip(peer, 0.1)
        measurements.sent(peer, 1000, 0.2)
    assert rates(measurements, 0.0).keys() == {"b", "c"}
    for clock.now_s in (600.0, 1200.0):
        measurements.round_trip("b", 0.1)
        measurements.sent("b", 1000, 0.2)
    news = news_at(measurements, 1200.0)
    assert news.latency_s.keys() == news.rate_bytes_per_s.keys() == {"b"}
    assert measurements.measured_at("c") is None
    assert measurements.poll(1300.0) is None


def test_who_is_gone_or_has_started_again_is_not_remembered():
    measurements = StageMeasurements(1000, FakeClock())
    measurements.on_view({"b": 1, "c": 1, "d": 1})
    for peer in "bcd":
        measurements.round_trip(peer, 0.1)
        measurements.sent(peer, 1000, 0.2)
    measurements.on_view({"b": 1, "c": 2})
    news = news_at(measurements, 0.0)
    assert news.latency_s.keys() == news.rate_bytes_per_s.keys() == {"b"}
    assert measurements.measured_at("c") is None


def test_who_is_not_ready_or_suspected_is_not_measured():
    measured: dict[str, float] = {}
    prober, all_serve = LinkProber("p0", measured.get), members_of(0, 1, 1, 2)

    def probed(members: list[Member], began_s: int) -> list[str]:
        found = []
        for now_s in range(began_s, began_s + 20):
            if (member := prober.next(members, now_s)) is not None:
                found.append(member.peer)
                measured[member.peer] = now_s
                prober.ended(member.peer, True, now_s)
        return sorted(found)

    starting = [replace(member, phase=Phase.STARTING) for member in all_serve]
    suspect = replace(all_serve[2], health=Health.SUSPECT)
    assert probed([starting[0], *all_serve[1:]], 0) == []
    assert probed([all_serve[0], starting[1], suspect, all_serve[3]], 20) == ["p3"]
    assert probed(all_serve, 40) == ["p1", "p2"]
