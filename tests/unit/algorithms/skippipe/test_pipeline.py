"""Costs in closed form, who serves which stage of which layers, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.pipeline import (
    Costs,
    Links,
    stage_layers,
)
from tests.unit.algorithms.skippipe.pipelines import even_pipeline


def links(latency_s: float, rate: float) -> Links:
    return Links(latency_s=np.full((2, 2), latency_s), rate_bytes_per_s=np.full((2, 2), rate))


def test_an_edge_is_latency_and_bytes_over_rate() -> None:
    np.testing.assert_allclose(links(0.1, 50.0).edge_s(100.0), [[0.0, 2.1], [2.1, 0.0]])


@pytest.mark.parametrize(
    ("latency_s", "rate", "reason"),
    [
        (0.1, 0.0, "rate must be above 0"),
        (0.1, float("nan"), "rate must be above 0"),
        (-0.1, 1.0, "latency must be at least 0"),
    ],
)
def test_links_that_cannot_be_are_refused(latency_s: float, rate: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        links(latency_s, rate)


def test_links_that_are_not_square_are_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        Links(latency_s=np.ones((2, 3)), rate_bytes_per_s=np.ones((2, 3)))


def costs(forward_s: tuple[float, ...], transfer_s: float = 2.0) -> Costs:
    between = transfer_s * (1.0 - np.eye(2))
    times = np.array(forward_s)
    return Costs(
        delay_s=links(0.1, 50.0).delay_s(),
        transfer_s=between,
        forward_s=times,
        backward_s=1.5 * times,
        loss_s=0.25 * times,
    )


@pytest.mark.parametrize(
    ("forward_s", "transfer_s", "reason"),
    [
        ((1.0, 0.0), 2.0, "forward_s must be above 0"),
        ((1.0, float("nan")), 2.0, "forward_s must be above 0"),
        ((1.0, 1.0), -2.0, "transfer_s must be at least 0"),
        ((1.0, 1.0, 1.0), 2.0, "delay_s must be at least 0 for each pair of 3 peers"),
    ],
)
def test_costs_that_cannot_be_are_refused(
    forward_s: tuple[float, ...], transfer_s: float, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        costs(forward_s, transfer_s)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        (((0, 1), ()), "stage 1 has no replica"),
        (((0, 1), (1,)), "exactly one"),
        (((0,), (1,)), "exactly one"),
    ],
)
def test_peers_that_serve_no_stage_or_two_are_refused(
    stages: tuple[tuple[int, ...], ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(even_pipeline((2, 1)), stages=stages)


def test_a_peer_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory"):
        replace(even_pipeline((2, 1)), memory=(1, 1, 0))


# ------------------------------------------------------------------ which layers to which stage

MOST_LAYERS = 8
SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=MOST_LAYERS)
# Binary fractions, whose sums are exact: which of two cuts is better is then beyond doubt.
SECONDS = st.lists(st.integers(1, 2**20).map(lambda n: n / 2**22), min_size=1, max_size=MOST_LAYERS)

Span = tuple[int, int]


def all_cuts(layers: int, stages: int) -> list[list[Span]]:
    """Every way to cut, by brute force."""
    inner = combinations(range(1, layers), stages - 1)
    return [[(a, b - 1) for a, b in pairwise((0, *ends, layers))] for ends in inner]


def score(costs: Sequence[float], outer_cost: float, cut: list[Span]) -> tuple[float, float]:
    """(the largest stage, the sum of squares)."""
    stages = [sum(costs[first : last + 1]) for first, last in cut]
    stages[0] += outer_cost
    return max(stages), sum(stage**2 for stage in stages)


@given(SIZES | SECONDS, st.integers(0, 10**12), st.data())
def test_no_other_cut_has_a_smaller_largest_stage_or_is_more_even(
    costs: list[float], outer_cost: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = stage_layers(costs, outer_cost, stages)
    cuts = all_cuts(len(costs), stages)
    assert found in cuts
    assert score(costs, outer_cost, found) == min(score(costs, outer_cost, cut) for cut in cuts)


@pytest.mark.parametrize("stages", [0, 5])
def test_each_stage_needs_a_layer(stages: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers cannot be cut into {stages} stages"):
        stage_layers([10] * 4, 0, stages)
