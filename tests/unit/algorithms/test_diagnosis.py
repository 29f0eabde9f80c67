"""Faults are named by comparing what peers have measured: the right one, and none without one."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.diagnosis import (
    Change,
    Diagnosis,
    FaultPlace,
    PeerFigures,
    Verdict,
    diagnose,
)

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

    Args: up, down, link: share of the usual rate; step_s, save_s: by peer.
    """

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
            peer=f"w{peer}",
            rounds=rounds,
            round_s=whole_s,
            stall_s=whole_s - computed[peer],
            step_s=computed[peer] / STEPS,
            steps=STEPS,
            saves=rounds,
            save_s=about((save_s or {}).get(peer, 0.2)),
            received={
                f"w{s}": (mbps, 2 * SHARD_MBIT / mbps)
                for (s, r), mbps in rates.items()
                if r == peer
            },
        )
        for peer in names
    ]


def places(verdicts: Sequence[Verdict]) -> list[FaultPlace]:
    return sorted(verdict.place for verdict in verdicts)


PEERS = st.integers(3, 9)
SLOW = st.floats(0.03, 0.3)


@given(PEERS, SLOW, st.data())
def test_each_fault_of_a_link_is_named_and_nothing_else(
    peers: int, share: float, data: st.DataObject
) -> None:
    one, other = data.draw(st.permutations(range(peers)))[:2]
    noise = random.Random(data.draw(st.integers(0, 1000)))
    for kind, figures in (
        ("uplink", simulated(peers, up={one: share}, noise=noise)),
        ("downlink", simulated(peers, down={one: share}, noise=noise)),
    ):
        assert places(diagnose(figures, in_turn=False)) == [FaultPlace(kind, f"w{one}")]
    figures = simulated(peers, link={(one, other): share}, noise=noise)
    assert places(diagnose(figures, in_turn=False)) == [FaultPlace("link", f"w{one}", f"w{other}")]


@given(PEERS, st.floats(2.0, 10.0), st.data())
def test_a_slow_machine_is_named_and_its_links_are_not(
    peers: int, times: float, data: st.DataObject
) -> None:
    slow, noise = data.draw(st.integers(0, peers - 1)), random.Random(data.draw(st.integers(0, 99)))
    figures = simulated(
        peers, step_s={slow: 0.1 * times}, up={slow: 0.2}, down={slow: 0.2}, noise=noise
    )
    assert places(diagnose(figures, in_turn=False)) == [FaultPlace("machine", f"w{slow}")]


@given(PEERS, st.floats(8.0, 50.0), st.data())
def test_a_slow_disk_is_named_though_it_costs_no_round(
    peers: int, times: float, data: st.DataObject
) -> None:
    slow, noise = data.draw(st.integers(0, peers - 1)), random.Random(data.draw(st.integers(0, 99)))
    (found,) = diagnose(simulated(peers, save_s={slow: 0.2 * times}, noise=noise), in_turn=False)
    assert (found.place, found.cost) == (FaultPlace("disk", f"w{slow}"), 0.0)


def test_figures_of_a_verdict() -> None:
    (found,) = diagnose(simulated(4, up={2: 0.15}), in_turn=False)
    assert found.place == FaultPlace("uplink", "w2")
    assert found.measured == pytest.approx(3.0)
    assert found.usual == pytest.approx(20.0)
    # 2 * 10 Mbit at 1 Mbit/s instead of 6.67: 17 s of a round of 22 s.
    assert found.cost == pytest.approx(17 / 22)
    (found,) = diagnose(simulated(4, up={2: 0.15}), in_turn=True)
    assert (found.measured, found.usual) == (pytest.approx(1.0), pytest.approx(20 / 3))


def test_of_two_peers_only_the_slower_direction_can_be_named() -> None:
    (found,) = diagnose(simulated(2, up={1: 0.1}), in_turn=False)
    assert found.place == FaultPlace("link", "w1", "w0")
    assert (found.measured, found.usual) == (pytest.approx(2.0), pytest.approx(20.0))


@given(st.integers(0, 999))
def test_what_nobody_waits_for_is_no_fault(seed: int) -> None:
    """As where rounds overlap with the steps."""
    slow = simulated(4, up={2: 0.1}, step_s={1: 0.5}, noise=random.Random(seed))
    assert diagnose([replace(each, stall_s=0.0) for each in slow], in_turn=False) == []


def test_a_peer_that_lies_harms_nobody_else() -> None:
    honest = simulated(5)
    everyone = {f"w{n}": (1e-3, 1e9) for n in range(1, 5)}
    lies = replace(honest[0], received=everyone, step_s=1e-9, save_s=1e-9, stall_s=1e9)
    found = diagnose([lies, *honest[1:]], in_turn=False)
    assert {each.place.peer for each in found} <= {"w0"}


# ------------------------------------------------------------------------------------ over time


def looks(diagnosis: Diagnosis, *spans: tuple[int, dict[int, float]]) -> list[tuple[int, Change]]:
    """Changes, by the time of the look: one each five seconds, in which two rounds pass.

    Args: spans: (looks, share of the uplink by peer), one after another.
    """
    now, found = 0, []
    for count, up in spans:
        for _ in range(count):
            figures = simulated(4, up=up, rounds=2 * now // 5)
            found += [(now, change) for change in diagnosis.update(now, figures)]
            now += 5
    return found


def test_a_fault_must_last_and_so_must_its_end() -> None:
    diagnosis = Diagnosis(in_turn=False)
    changes = looks(diagnosis, (4, {}), (6, {2: 0.1}), (6, {}))
    assert [(at, change.found) for at, change in changes] == [(30, True), (60, False)]
    assert {change.verdict.place for _, change in changes} == {FaultPlace("uplink", "w2")}
    assert changes[0][1].verdict.since_s == 20
    assert diagnosis.verdicts == []


def test_short_faults_and_a_fault_at_the_limit_do_not_flicker() -> None:
    spans = [(2, {2: 0.1}), (1, {})] * 20
    assert looks(Diagnosis(in_turn=False), *spans) == []
    spans = [(4, {2: 0.1}), *[(2, {2: 0.6}), (2, {2: 0.45})] * 10]
    changes = looks(Diagnosis(in_turn=False), *spans)
    assert [change.found for _, change in changes] == [True]


def test_a_fault_goes_with_its_peer() -> None:
    diagnosis = Diagnosis(in_turn=False)
    looks(diagnosis, (6, {2: 0.1}))
    assert [each.place for each in diagnosis.verdicts] == [FaultPlace("uplink", "w2")]
    others = [each for each in simulated(4) if each.peer != "w2"]
    (change,) = diagnosis.update(30.0, others)
    assert (change.found, change.verdict.place) == (False, FaultPlace("uplink", "w2"))
