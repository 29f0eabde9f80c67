"""Sum and visits of a stage, against plain means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murmuration.worker.pipeline.stage_replica import StageGradients

SHAPES = {"weight": torch.Size([2, 3]), "bias": torch.Size([3])}


def gradients(microbatch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def add(total: StageGradients, microbatch: int) -> None:
    """As a backward does."""
    for name, gradient in gradients(microbatch).items():
        total.sums[name].add_(gradient)
    total.added(microbatch)


@given(st.lists(st.integers(0, 20), max_size=30))
def test_the_mean_divides_by_the_visits_and_counts_each_microbatch_once(
    arrivals: list[int],
) -> None:
    total = StageGradients(SHAPES)
    for position, microbatch in enumerate(arrivals):
        assert (microbatch in total) == (microbatch in arrivals[:position])
        if microbatch not in total:
            add(total, microbatch)
    assert total.visits == len(set(arrivals))
    averaged = total.averaged()
    assert averaged.keys() == SHAPES.keys()
    for name, value in averaged.items():
        wanted = [gradients(each)[name] for each in set(arrivals)] or [torch.zeros(SHAPES[name])]
        torch.testing.assert_close(value, torch.stack(wanted).mean(dim=0), rtol=1e-5, atol=1e-6)


def test_a_microbatch_that_is_there_is_not_added_again() -> None:
    total = StageGradients(SHAPES)
    add(total, 1)
    with pytest.raises(AssertionError, match="counts once"):
        total.added(1)
