"""Costs in closed form, and what is refused."""

import numpy as np
import pytest

from algorithms.skippipe.cost import Links, activation_bytes, costs_of


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


def test_a_visit_costs_w_and_one_and_a_half_w_and_the_loss_a_quarter() -> None:
    costs = costs_of(links(0.1, 50.0), [2.0, 4.0], 100.0)
    assert costs.backward_s.tolist() == [3.0, 6.0]
    assert costs.loss_s.tolist() == [0.5, 1.0]
    np.testing.assert_allclose(costs.edge_s, links(0.1, 50.0).edge_s(100.0))


def test_recomputation_makes_backward_longer() -> None:
    assert costs_of(links(0.1, 50.0), [2.0, 4.0], 1.0, backward_ratio=3.0).backward_s[0] == 6.0


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


def test_a_visit_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="forward_s must be above 0"):
        costs_of(links(0.1, 1.0), [1.0, 0.0], 1.0)
