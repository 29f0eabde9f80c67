"""What survives a round: merge for those in it, carry-over for those who were not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.diloco import carry_over, merge, pseudo_gradient

LOCAL, ANCHOR = torch.tensor([1.0, -3.0, 0.5]), torch.tensor([3.0, 1.0, 0.5])
VALUES = st.floats(-100, 100, width=32)


def test_alpha_zero_restarts_from_a_copy_of_the_anchor() -> None:
    merged = merge(LOCAL, ANCHOR, 0.0)
    assert torch.equal(merged, ANCHOR)
    assert merged.data_ptr() != ANCHOR.data_ptr()


def test_alpha_one_half_is_the_middle() -> None:
    assert merge(LOCAL, ANCHOR, 0.5).tolist() == [2.0, -1.0, 0.5]


def test_neither_merge_nor_carry_over_writes_into_its_inputs() -> None:
    local, anchor = LOCAL.clone(), ANCHOR.clone()
    merge(local, anchor, 0.5).zero_()
    merge(local, anchor, 0.0).zero_()
    carry_over(local, anchor, anchor + 1).zero_()
    assert torch.equal(local, LOCAL)
    assert torch.equal(anchor, ANCHOR)


@given(VALUES, VALUES, st.floats(0, 0.99))
def test_a_merge_lies_between_local_and_anchor(local: float, anchor: float, alpha: float) -> None:
    (merged,) = merge(torch.tensor([local]), torch.tensor([anchor]), alpha).tolist()
    slack = 1e-5 * (1 + abs(local) + abs(anchor))
    assert min(local, anchor) - slack <= merged <= max(local, anchor) + slack


@given(VALUES, VALUES, VALUES)
def test_carry_over_keeps_the_pseudo_gradient(local: float, old: float, new: float) -> None:
    here, before, after = (torch.tensor([value]) for value in (local, old, new))
    moved = carry_over(here, before, after)
    kept = pseudo_gradient(after, moved) - pseudo_gradient(before, here)
    assert abs(kept.item()) <= 4e-7 * (1 + abs(local) + 2 * abs(old) + 2 * abs(new))


def test_carry_over_is_exact_where_the_numbers_are() -> None:
    moved = carry_over(torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([1.5]))
    assert moved.tolist() == [0.5]
