"""A model as numbers, and what a plan sends of it."""

import math
from dataclasses import replace

import pytest

from murmuration.algorithms.presets import PRESETS
from murmuration.algorithms.workload import Workload, rounds_of, workload_of

DILOCO = PRESETS["diloco"]
SMALL = Workload(step_s=0.1, layers=(1000,) * 6, outside=500)


def test_names_are_read_as_fragments_read_them() -> None:
    sizes = {"embed": 7, "layers.1.a": 2, "layers.0.a": 3, "layers.1.b": 4}
    assert workload_of(sizes, 0.5) == Workload(step_s=0.5, layers=(3, 6), outside=7)


def test_a_model_without_layers_is_one_layer() -> None:
    assert workload_of({"w": 7}, 0.5) == Workload(step_s=0.5, layers=(7,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_s": 0.0}, "a step of 0 s"),
        ({"step_s": math.nan}, "a step of nan s"),
        ({"layers": ()}, "at least one layer"),
        ({"layers": (3, 0)}, "at least one layer, and each layer a parameter"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize("peers", [2, 3, 4, 16])
def test_each_direction_costs_the_optimum_of_an_all_reduce(peers: int) -> None:
    sent = rounds_of(DILOCO, SMALL, peers)
    assert sent.bits_per_period == pytest.approx(2 * (peers - 1) / peers * 32 * 6500)


def test_contribution_and_reduction_may_differ() -> None:
    sent = rounds_of(replace(DILOCO, codec="bf16"), SMALL, 2)
    assert sent.bits_per_period == pytest.approx(1 / 2 * (16 + 32) * 6500)


@pytest.mark.parametrize("peers", [2, 4, 64])
def test_a_pair_costs_the_same_in_any_swarm(peers: int) -> None:
    """The anchor goes ahead, so that only the pseudo-gradient is waited for."""
    sent = rounds_of(PRESETS["noloco"], SMALL, peers)
    assert sum(sent.fragment_bits) == sent.ahead_bits == 32 * 6500
    assert sent.bits_per_period == 2 * 32 * 6500
    in_fours = rounds_of(replace(PRESETS["noloco"], group_size=4), SMALL, peers)
    assert in_fours.bits_per_period == (min(4, peers) - 1) * sent.bits_per_period


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="7 fragments of 6 layers"):
        rounds_of(replace(DILOCO, fragments=7), SMALL, 4)
    with pytest.raises(ValueError, match="7 fragments do not fit into inner_steps = 5"):
        rounds_of(replace(DILOCO, fragments=6, inner_steps=5), SMALL, 4)
