"""Whole runs: the same seed gives the same figures, and what is refused."""

import dataclasses

import pytest

from murmuration.algorithms.link import Link, MessageTime, pair_s
from murmuration.worker.simulation import Scenario, simulate
from murmuration.worker.simulation.task import percentile

TROUBLED = Scenario(
    peers=14,
    rounds=6,
    step_spread=0.2,
    link=Link(rate_mbps=20.0, delay_s=0.05, loss=1.0),
    latency_spread=1.0,
    slow_factor=2.0,
    slow_share=0.2,
    partition=(5.0, 15.0),
    crash_share=0.1,
    freeze_share=0.1,
    freeze_s=10.0,
    seed=7,
)


@pytest.mark.parametrize("preset", ["noloco", "diloco"])
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(preset: str) -> None:
    scenario = dataclasses.replace(TROUBLED, preset=preset)
    first = simulate(scenario)
    assert simulate(scenario) == first
    assert simulate(dataclasses.replace(scenario, seed=8)) != first


def test_short_messages_take_about_what_the_latency_model_says() -> None:
    scenario = Scenario(
        peers=64,
        rounds=10,
        params=1,
        link=Link(rate_mbps=1000.0, delay_s=0.01),
        latency_spread=1.0,
    )
    found = simulate(scenario)
    assert found.pair_model_s == pytest.approx(pair_s(MessageTime(0.01, 1.0)), rel=1e-4)
    assert found.sync_mean_s == pytest.approx(found.pair_model_s, rel=0.5)
    assert found.tree_model_s is not None
    assert found.sync_mean_s is not None
    assert found.tree_model_s > 4 * found.sync_mean_s


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peers": 1}, "peers is 1; 2 to 10,000"),
        ({"peers": 10_001}, "2 to 10,000"),
        ({"preset": "diloco", "peers": 129}, "16,641 streams a round; at most 128"),
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"group_size": 1}, "group size 1"),
        ({"step_s": float("nan")}, "it must be above 0"),
        ({"step_spread": -1.0}, "step_spread is -1"),
        ({"crash_share": 1.0}, "crash_share is 1; it must be 0 to 1, below 1"),
        ({"slow_factor": 0.5}, "0.5 times slower"),
        ({"partition": (5.0, 5.0)}, "it must end after it began"),
        ({"codec": "fp5"}, "unknown codec 'fp5'"),
        ({"link": Link(rate_mbps=1.0), "latency_spread": 1.0}, "needs a link with a delay"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Scenario(**changes)


def test_percentiles_are_values_that_occur() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None
