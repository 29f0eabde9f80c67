"""The paper's simulator: two layers by hand, and the paper's own table."""

import numpy as np
import pytest

from murmuration.algorithms.workload import PlannedRounds, Workload
from tests.lab.plan_table import (
    METHODS,
    MODELS,
    PAPER_GBPS,
    first_points,
    nearest_point,
    utilization_by_layer,
)


def test_every_entry_is_reproduced_within_one_point_of_the_grid_and_most_exactly() -> None:
    assert set(PAPER_GBPS) == {(method, model) for method in METHODS for model in MODELS}
    distances = [
        ours - nearest_point(paper)
        for (method, model), row in PAPER_GBPS.items()
        for paper, ours in zip(row, first_points(method, model), strict=True)
    ]
    assert len(distances) == 75
    assert max(map(abs, distances)) <= 1
    assert distances.count(0) >= 68


@pytest.mark.parametrize(
    ("layers", "step_s", "layer_s", "period_s"),
    [
        (1, 0.1, 0.4, 0.5),  # waits for all of it
        # Five nodes of 0.1 s: forward 1, forward 2, activations 2, parameters 2, parameters 1.
        (2, 0.5, 0.05, 0.5 + 0.05),  # layer 2 is through before layer 1 is ready
        (2, 0.5, 0.1, 0.4 + 0.2),
        (2, 0.5, 0.3, 0.4 + 0.6),  # from when layer 2 is ready, the link is busy
        (2, 0.5, 0.0, 0.5),
    ],
)
def test_data_parallel_by_hand(layers: int, step_s: float, layer_s: float, period_s: float) -> None:
    workload = Workload(step_s=step_s, layers=(1000,) * layers)
    sent = PlannedRounds(
        inner_steps=1,
        overlap_steps=0,
        fragments=workload.fragments(1),
        fragment_bits=(32_000.0 * layers,),
    )
    mbps = 32_000 / layer_s / 1e6 if layer_s else np.inf
    found = utilization_by_layer(workload, sent, np.array([mbps]))
    assert found[0] == pytest.approx(step_s / period_s)
