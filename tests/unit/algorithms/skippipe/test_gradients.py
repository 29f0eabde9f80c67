"""Sum and visits of a stage, against plain means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe.gradients import StageGradients

SHAPES = {"weight": torch.Size([2, 3]), "bias": torch.Size([3])}


def gradients(microbatch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@given(st.lists(st.integers(0, 20), max_size=30))
def test_the_mean_divides_by_the_visits_and_counts_each_microbatch_once(
    arrivals: list[int],
) -> None:
    total = StageGradients(SHAPES)
    for position, microbatch in enumerate(arrivals):
        assert total.add(microbatch, gradients(microbatch)) == (
            microbatch not in arrivals[:position]
        )
    assert total.visits == len(set(arrivals))
    assert total.counted == set(arrivals)
    averaged = total.averaged()
    assert averaged.keys() == SHAPES.keys()
    for name, value in averaged.items():
        wanted = [gradients(each)[name] for each in set(arrivals)] or [torch.zeros(SHAPES[name])]
        torch.testing.assert_close(value, torch.stack(wanted).mean(dim=0), rtol=1e-5, atol=1e-6)


def test_the_next_iteration_begins_at_zero() -> None:
    total = StageGradients(SHAPES)
    for microbatch in (1, 2, 2):
        total.add(microbatch, gradients(microbatch))
    averaged = total.averaged()
    total.clear()
    assert total.visits == 0
    assert not any(value.any() for value in averaged.values())  # they are the sums
    assert total.add(1, gradients(3))
    torch.testing.assert_close(total.averaged()["bias"], gradients(3)["bias"])


def test_bfloat16_gradients_are_summed_in_fp32() -> None:
    total = StageGradients({"bias": torch.Size([1])})
    for microbatch in range(512):  # in bf16 the sum would stop at 256
        total.add(microbatch, {"bias": torch.ones(1, dtype=torch.bfloat16)})
    assert total.averaged()["bias"].item() == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"weight": torch.zeros(2, 3)}, "bias"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, "instead of"),
    ],
)
def test_gradients_that_do_not_fit_change_nothing(
    wrong: dict[str, torch.Tensor], reason: str
) -> None:
    total = StageGradients(SHAPES)
    with pytest.raises(ValueError, match=reason):
        total.add(1, wrong)
    assert total.visits == 0
    assert not total.averaged()["weight"].any()
