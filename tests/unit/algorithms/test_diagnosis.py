"""Faults are named by comparing what peers have measured: the right one, and none without one."""

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import ANY

import pytest
from hypothesis import given, strategies as st

from murmuration.algorithms.diagnosis import Diagnosis, FaultPlace, PeerFigures, Verdict, diagnose

RATE_MBPS, SHARD_MBIT, ROUND_S, STEPS = 20.0, 10.0, 4.0, 20


def simulated(
    peers: int,
    *,
    up: dict[int, float] | None = None,
    down: dict[int, float] | None = None,
    link: dict[tuple[int, int], float] | None = None,
    step_s: dict[int, float] | None = None,
    save_s: dict[int, float] | None = None,
    noise: random.Random | None = None,
    rounds: int = 8,
) -> list[PeerFigures]:
    """Figures of mean rounds in which each gives every other a shard and gets one back, at once.

    Args: up, down, link: share of the usual rate; step_s, save_s: by peer."""

    def about(value: float) -> float:
        return value * (noise.uniform(0.88, 1.12) if noise is not None else 1.0)

    def rate(sender: int, receiver: int) -> float:
        ends = (up or {}).get(sender, 1.0), (down or {}).get(receiver, 1.0)
        whole = RATE_MBPS * min(*ends, (link or {}).get((sender, receiver), 1.0))
        return about(whole / (peers - 1))

    names = range(peers)
    rates = {(s, r): rate(s, r) for s in names for r in names if s != r}
    slowest_s = max((2 * SHARD_MBIT / mbps for mbps in rates.values()), default=0.0)
    computed = {peer: STEPS * about((step_s or {}).get(peer, 0.1)) for peer in names}
    whole_s = max(computed.values()) + slowest_s
    return [
        PeerFigures(
            peer=f"w{peer}", rounds=rounds, round_s=whole_s, stall_s=whole_s - computed[peer],
            step_s=computed[peer] / STEPS, steps=STEPS, saves=rounds,
            save_s=about((save_s or {}).get(peer, 0.2)),
            received={
                f"w{s}": (rates[s, peer], 2 * SHARD_MBIT / rates[s, peer])
                for s in names
                if s != peer
            },
        )
        for peer in names
    ]  # fmt: skip


def found(figures: Sequence[PeerFigures]) -> list[FaultPlace]:
    return [verdict.place for verdict in diagnose(figures, in_turn=False)]


PEERS = st.integers(3, 9)
NOISE = st.integers(0, 1000).map(random.Random)


@given(PEERS, st.floats(0.03, 0.3), NOISE, st.data())
def test_each_fault_of_a_link_is_named_and_nothing_else(peers, share, noise, data):
    one, other = data.draw(st.permutations(range(peers)))[:2]
    for slow, place in (
        ({"up": {one: share}}, FaultPlace("uplink", f"w{one}")),
        ({"down": {one: share}}, FaultPlace("downlink", f"w{one}")),
        ({"link": {(one, other): share}}, FaultPlace("link", f"w{one}", f"w{other}")),
    ):
        assert found(simulated(peers, noise=noise, **slow)) == [place]


@given(PEERS, st.floats(2.0, 10.0), NOISE)
def test_a_slow_machine_is_named_and_its_links_are_not(peers, times, noise):
    slow = noise.randrange(peers)
    figures = simulated(
        peers, step_s={slow: 0.1 * times}, up={slow: 0.2}, down={slow: 0.2}, noise=noise
    )
    assert found(figures) == [FaultPlace("machine", f"w{slow}")]


@given(PEERS, st.floats(8.0, 50.0), NOISE)
def test_a_slow_disk_is_named_though_it_costs_no_round(peers, times, noise):
    slow = noise.randrange(peers)
    (verdict,) = diagnose(simulated(peers, save_s={slow: 0.2 * times}, noise=noise), in_turn=False)
    assert (verdict.place, verdict.cost) == (FaultPlace("disk", f"w{slow}"), 0.0)


def test_figures_of_a_verdict():
    """A verdict on two peers can name only the slower direction."""
    # 2 * 10 Mbit at 1 Mbit/s instead of 6.67: 17 s of a round of 22 s.
    uplink = FaultPlace("uplink", "w2")
    for peers, up, in_turn, place, figures in (
        (4, {2: 0.15}, False, uplink, (3.0, 20.0, pytest.approx(17 / 22))),
        (4, {2: 0.15}, True, uplink, (1.0, 20 / 3, ANY)),
        (2, {1: 0.1}, False, FaultPlace("link", "w1", "w0"), (2.0, 20.0, ANY)),
    ):
        (verdict,) = diagnose(simulated(peers, up=up), in_turn=in_turn)
        assert verdict.place == place
        assert (verdict.measured, verdict.usual) == pytest.approx(figures[:2])
        assert verdict.cost == figures[2]


@given(NOISE)
def test_what_nobody_waits_for_is_no_fault(noise):
    """As where rounds overlap with the steps."""
    slow = simulated(4, up={2: 0.1}, step_s={1: 0.5}, noise=noise)
    assert found([replace(each, stall_s=0.0) for each in slow]) == []


@pytest.mark.parametrize("came", [(1e-3, 1e9), (1e9, 0.0)])
@pytest.mark.parametrize("peers", [3, 4, 5])
def test_a_peer_that_lies_harms_nobody_else(peers, came):
    honest, everyone = simulated(peers), {f"w{n}": came for n in range(1, peers)}
    lies = replace(honest[0], received=everyone, step_s=1e-9, save_s=1e-9, stall_s=1e9)
    assert {place.peer for place in found([lies, *honest[1:]])} <= {"w0"}


def looks(
    diagnosis: Diagnosis, *spans: tuple[int, dict[int, float]]
) -> list[tuple[int, Verdict, bool]]:
    """Changes, by the time of the look: one each five seconds, in which two rounds pass.

    Args: spans: (looks, share of the uplink by peer), one after another."""
    now, changes = 0, []
    for count, up in spans:
        for _ in range(count):
            figures = simulated(4, up=up, rounds=2 * now // 5)
            changes += [(now, *change) for change in diagnosis.update(now, figures)]
            now += 5
    return changes


def test_a_fault_must_last_and_so_must_its_end():
    diagnosis = Diagnosis(in_turn=False)
    changes = looks(diagnosis, (4, {}), (6, {2: 0.1}), (6, {}))
    assert [(at, found) for at, _, found in changes] == [(30, True), (60, False)]
    assert {verdict.place for _, verdict, _ in changes} == {FaultPlace("uplink", "w2")}
    assert changes[0][1].since_s == 20
    assert diagnosis.verdicts == []


def test_short_faults_and_a_fault_at_the_limit_do_not_flicker():
    assert looks(Diagnosis(in_turn=False), *[(2, {2: 0.1}), (1, {})] * 20) == []
    spans = [(4, {2: 0.1}), *[(2, {2: 0.6}), (2, {2: 0.45})] * 10]
    assert [found for *_, found in looks(Diagnosis(in_turn=False), *spans)] == [True]


def test_a_fault_goes_with_its_peer():
    diagnosis, uplink = Diagnosis(in_turn=False), FaultPlace("uplink", "w2")
    looks(diagnosis, (6, {2: 0.1}))
    assert [each.place for each in diagnosis.verdicts] == [uplink]
    ((verdict, found),) = diagnosis.update(
        30.0, [each for each in simulated(4) if each.peer != "w2"]
    )
    assert (found, verdict.place) == (False, uplink)
