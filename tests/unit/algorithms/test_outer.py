"""The outer step: torch's Nesterov, with nothing written in place."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.diloco import Nesterov


@given(st.floats(0.01, 1.5), st.floats(0, 0.99), st.integers(1, 12), st.integers(0, 99))
def test_it_equals_torchs_nesterov(lr: float, momentum: float, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randn(20, generator=generator)
    # Torch refuses Nesterov without momentum; then it is plain descent.
    theirs = torch.nn.Parameter(anchor.clone())
    torchs = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    ours, buffer = Nesterov(lr, momentum), torch.zeros(20)
    for _ in range(steps):
        g = torch.randn(20, generator=generator)
        theirs.grad = g.clone()
        torchs.step()
        anchor, buffer = ours.step(anchor, buffer, g)
    assert torch.allclose(anchor, theirs.detach(), rtol=1e-4, atol=1e-4)


def test_two_steps_by_hand() -> None:
    outer = Nesterov(lr=0.5, momentum=0.5)
    anchor, buffer = outer.step(torch.tensor([8.0]), torch.tensor([0.0]), torch.tensor([4.0]))
    assert (anchor.item(), buffer.item()) == (8 - 0.5 * (4 + 0.5 * 4), 4.0)
    anchor, buffer = outer.step(anchor, buffer, torch.tensor([2.0]))
    assert (anchor.item(), buffer.item()) == (5 - 0.5 * (2 + 0.5 * 4), 4.0)


def test_results_are_fresh_and_inputs_untouched() -> None:
    anchor, buffer, g = torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 3.0)
    new_anchor, new_buffer = Nesterov(0.7, 0.9).step(anchor, buffer, g)
    new_anchor.zero_()
    new_buffer.zero_()
    assert [t.tolist() for t in (anchor, buffer, g)] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 9))
def test_a_step_on_a_part_is_the_part_of_a_step(size: int, cut: int, seed: int) -> None:
    """Peers may hold a fragment at other alignments; the bits must not depend on it."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) for _ in range(3)]
    whole = Nesterov(0.7, 0.9).step(*parts)
    piece = Nesterov(0.7, 0.9).step(*(part[cut:] for part in parts))
    assert torch.equal(whole[0][cut:], piece[0])
    assert torch.equal(whole[1][cut:], piece[1])


@pytest.mark.parametrize(
    ("lr", "momentum", "message"),
    [
        (0.0, 0.9, r"^outer_lr is 0\.0; it must be above 0"),
        (-1.0, 0.9, r"^outer_lr is -1\.0"),
        (math.nan, 0.9, r"^outer_lr is nan"),
        (0.7, 1.0, r"^outer_momentum is 1\.0; it must be in 0\.\.1, below 1$"),
        (0.7, -0.1, r"^outer_momentum is -0\.1"),
        (0.7, math.nan, r"^outer_momentum is nan"),
    ],
)
def test_rates_out_of_range_are_refused(lr: float, momentum: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Nesterov(lr, momentum)
