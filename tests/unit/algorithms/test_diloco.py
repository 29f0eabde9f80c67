"""Each part of an outer round: closed forms, fresh results, the same bits for whichever peer."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from murmuration.algorithms.diloco import (
    Nesterov,
    carry_over,
    mean_in_order,
    merge,
    pseudo_gradient,
)
from murmuration.algorithms.fragments import shard_bounds

VALUES = st.floats(-100, 100, width=32)


@pytest.mark.parametrize(
    ("operation", "operands"),
    [
        (lambda anchor, local: (pseudo_gradient(anchor, local),), 2),
        (lambda one: (mean_in_order([one]),), 1),
        (lambda one, other: (mean_in_order([one, other]),), 2),
        (lambda one, other: (mean_in_order([one, other], [1, 2]),), 2),
        (lambda *three: Nesterov(0.7, 0.9).step(*three), 3),
        (lambda local, anchor: (merge(local, anchor, 0.5),), 2),
        (lambda local, anchor: (merge(local, anchor, 0.0),), 2),
        (lambda *three: (carry_over(*three),), 3),
    ],
)
def test_results_are_fresh_and_inputs_untouched(operation, operands):
    inputs = [torch.full((3,), float(1 + index)) for index in range(operands)]
    for result in operation(*inputs):
        result.zero_()
    assert [each.tolist() for each in inputs] == [[1.0 + index] * 3 for index in range(operands)]


def contributions(count: int, elements: int, seed: int) -> list[Tensor]:
    """The contributions, of very different sizes: the order of the sum shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(elements, generator=generator) * 10.0 ** (index % 7 - 3)
        for index in range(count)
    ]


class TestMean:
    @given(st.integers(1, 9), st.integers(1, 5000), st.integers(1, 7), st.integers(1, 64))
    def test_it_is_the_left_to_right_sum_over_the_count_bit_for_bit_in_blocks_too(
        self, count, elements, shards, align
    ):
        values = contributions(count, elements, seed=elements)
        mean = mean_in_order(iter(values))
        assert torch.equal(mean, sum(values[1:], values[0].clone()) / count)
        blocks = [
            mean_in_order(value[start:stop] for value in values)
            for start, stop in shard_bounds(elements, shards, align)
        ]
        assert torch.equal(torch.cat(blocks), mean)

    def test_the_order_matters_to_the_last_bits_so_it_must_be_fixed(self):
        big, small = torch.tensor([1e8]), torch.tensor([1.0])
        assert mean_in_order([big, small, -big]).item() == 0.0
        assert mean_in_order([big, -big, small]).item() == pytest.approx(1 / 3)

    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=6),
        st.booleans(),
    )
    def test_over_senders_each_value_is_divided_by_those_that_sent_it(self, sent, weighted):
        weights = [weight if weighted else 1 for weight, _ in sent]
        values = []
        for place, (_, seed) in enumerate(sent):
            generator = torch.Generator().manual_seed(seed + 100 * place)
            dense = torch.randn(40, generator=generator)
            values.append(dense * (torch.rand(40, generator=generator) < 0.3))
        mean = mean_in_order(iter(values), weights if weighted else None, "senders")
        for at in range(40):
            there = [(v[at].item(), w) for v, w in zip(values, weights, strict=True) if v[at] != 0]
            total = sum(w for _, w in there) or 1
            if weighted and len(set(weights)) == 1:  # as none
                total, there = len(there) or 1, [(value, 1) for value, _ in there]
            expected = sum(value * weight for value, weight in there) / total
            assert mean[at].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_over_senders_dense_values_have_the_mean_over_all(self):
        values = contributions(5, 50, 1)
        assert torch.equal(mean_in_order(values, over="senders"), mean_in_order(values))
        weights = [1, 2, 3, 4, 5]
        plain = mean_in_order(values, weights)
        assert torch.equal(mean_in_order(values, weights, "senders"), plain)

    @given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 3))
    def test_weights_count_what_they_say(self, weights, seed):
        values = contributions(len(weights), 50, seed)
        pairs = zip(values, weights, strict=True)
        repeated = [value for value, weight in pairs for _ in range(weight)]
        expected = torch.stack(repeated).double().mean(0)
        found = mean_in_order(values, weights).double()
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    @given(st.integers(1, 6), st.integers(1, 50))
    def test_equal_weights_change_no_bit(self, count, weight):
        values = contributions(count, 50, seed=0)
        assert torch.equal(mean_in_order(values, [weight] * count), mean_in_order(values))


class TestOuterStep:
    @given(st.floats(0.01, 1.5), st.floats(0, 0.99), st.integers(1, 12), st.integers(0, 99))
    def test_it_equals_torchs_nesterov(self, lr, momentum, steps, seed):
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

    @given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 9))
    def test_a_step_on_a_part_is_the_part_of_a_step(self, size, cut, seed):
        """Peers may hold a fragment at other alignments; the bits must not depend on it."""
        parts = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
        outer = Nesterov(0.7, 0.9, clip=1.0, penalty=0.5)
        piece = outer.step(*(part[cut:] for part in parts))
        for whole, cut_off in zip(outer.step(*parts), piece, strict=True):
            assert torch.equal(whole[cut:], cut_off)

    def test_a_penalty_and_a_clip_by_hand(self):
        """Values: the last move as large as what comes; none; against it; both nothing."""
        outer = Nesterov(lr=1.0, momentum=0.5, clip=3.0, penalty=2.0)
        buffer, g = torch.tensor([4.0, 0.0, -1.0, 0.0]), torch.tensor([4.0, 2.0, 3.0, 0.0])
        anchor, moved = outer.step(torch.zeros(4), buffer, g)
        fresh = [4 / (1 + 2 * 0.5), 2.0, 3 / (1 + 2 * 0.25), 0.0]
        assert moved.tolist() == [3.0, 2.0, 1.5, 0.0]  # 2 + 0.5 * 4 is clipped
        assert (-anchor).tolist() == [f + 0.5 * m for f, m in zip(fresh, moved, strict=True)]


class TestGoingOn:
    @given(VALUES, VALUES, st.floats(0, 0.99))
    def test_a_merge_is_between_local_and_anchor_by_alpha(self, local, anchor, alpha):
        (merged,) = merge(torch.tensor([local]), torch.tensor([anchor]), alpha).tolist()
        slack = 1e-5 * (1 + abs(local) + abs(anchor))
        assert merged == pytest.approx(alpha * local + (1 - alpha) * anchor, abs=slack)
        assert alpha or merged == anchor

    @given(VALUES, VALUES, VALUES)
    def test_carry_over_keeps_the_pseudo_gradient(self, local, old, new):
        here, before, after = (torch.tensor([value]) for value in (local, old, new))
        moved = carry_over(here, before, after)
        kept = pseudo_gradient(after, moved) - pseudo_gradient(before, here)
        assert abs(kept.item()) <= 4e-7 * (1 + abs(local) + 2 * abs(old) + 2 * abs(new))
