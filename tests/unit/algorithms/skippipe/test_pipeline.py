"""Costs in closed form, who serves which stage, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from murmuration.algorithms.skippipe.pipeline import Costs, Links, activation_bytes
from tests.unit.algorithms.skippipe.pipelines import even_pipeline


def links(latency_s: float, rate: float, overhead_s: float = 0.0) -> Links:
    return Links(
        latency_s=np.full((2, 2), latency_s),
        rate_bytes_per_s=np.full((2, 2), rate),
        overhead_s=overhead_s,
    )


def test_an_edge_is_latency_and_bytes_over_rate_and_overhead() -> None:
    edge_s = links(0.1, 50.0, overhead_s=0.01).edge_s(100.0)
    np.testing.assert_allclose(edge_s, [[0.0, 2.11], [2.11, 0.0]])


def test_activations_are_dim_times_context_times_samples_times_element() -> None:
    assert activation_bytes(dim=96, context=128, samples=4, element_bytes=2) == 98304


@pytest.mark.parametrize(
    ("latency_s", "rate", "overhead_s", "reason"),
    [
        (0.1, 0.0, 0.0, "rate must be above 0"),
        (0.1, float("nan"), 0.0, "rate must be above 0"),
        (-0.1, 1.0, 0.0, "latency and overhead"),
        (0.1, 1.0, -1.0, "latency and overhead"),
    ],
)
def test_links_that_cannot_be_are_refused(
    latency_s: float, rate: float, overhead_s: float, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        links(latency_s, rate, overhead_s)


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


def test_a_message_is_there_when_it_was_sent_and_has_travelled() -> None:
    wanted_s = links(0.1, 50.0).edge_s(100.0)
    np.testing.assert_allclose(costs((2.0, 4.0)).edge_s, wanted_s)


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


def test_each_peer_knows_its_stage() -> None:
    assert even_pipeline((2, 1, 2)).stage_of == (0, 0, 1, 2, 2)


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
