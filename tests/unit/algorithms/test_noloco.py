"""Outer steps of groups, and when their replicas come together."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.noloco import (
    GroupUpdate,
    ModifiedMomentum,
    SharedMomentum,
    largest_stable_b,
    largest_stable_c,
    largest_stable_step,
    mean_spectral_radius,
    second_moments,
    spectral_radius,
)


def test_two_steps_by_hand() -> None:
    outer = ModifiedMomentum(a=0.5, b=0.25, c=0.5)
    one = torch.tensor
    anchor, momentum = outer.step(one([8.0]), one([0.0]), one([4.0]), one([6.0]))
    assert (anchor.item(), momentum.item()) == (8 - 0.25 * 4 - 0.5 * 2, -2.0)
    anchor, momentum = outer.step(anchor, momentum, one([-8.0]), one([10.0]))
    assert (anchor.item(), momentum.item()) == (6 - 1 + 2 + 2, 3.0)


def test_it_is_the_papers_update_with_d_for_minus_g() -> None:
    generator = torch.Generator().manual_seed(0)
    size, a, b, c = 4, 0.6, 0.8, 0.5
    phi, theta, delta = (torch.randn(size, 50, generator=generator) for _ in range(3))
    d = theta - phi
    paper_delta = a * delta + b / size * d.sum(dim=0) - c * (phi - phi.sum(dim=0) / size)
    mean_g, mean_anchor = (phi - theta).mean(dim=0), phi.mean(dim=0)
    outer = ModifiedMomentum(a, b, c, size=size)
    for i in range(size):
        anchor, momentum = outer.step(phi[i], delta[i], mean_g, mean_anchor)
        assert torch.allclose(momentum, paper_delta[i], atol=1e-6)
        assert torch.allclose(anchor, phi[i] + paper_delta[i], atol=1e-6)


def test_a_shared_momentum_is_heavy_ball_of_the_groups_means() -> None:
    generator = torch.Generator().manual_seed(3)
    outer = SharedMomentum(a=0.3, b=1.5)
    anchors, momenta, gs = (torch.randn(4, 50, generator=generator) for _ in range(3))
    contributions = [outer.contribution(gs[i], momenta[i]) for i in range(4)]
    mean, mean_anchor = torch.stack(contributions).mean(0), anchors.mean(0)
    expected = 0.3 * momenta.mean(0) + gs.mean(0)
    for i in range(4):
        anchor, momentum = outer.step(anchors[i], momenta[i], mean, mean_anchor)
        assert torch.allclose(momentum, expected, atol=1e-6)
        assert torch.allclose(anchor, mean_anchor - 1.5 * expected, atol=1e-6)


def test_only_a_shared_momentum_starts_from_the_group() -> None:
    mean = torch.ones(3)
    assert SharedMomentum(0.3, 1.5).head_start(mean) is mean
    assert ModifiedMomentum().head_start(mean) is None


def test_a_group_that_agrees_stays_together_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    anchor, momentum, mean_g = (torch.randn(99, generator=generator) for _ in range(3))
    pulled = ModifiedMomentum(c=0.7).step(anchor, momentum, mean_g, anchor.clone())
    freely = ModifiedMomentum(c=0.1).step(anchor, momentum, mean_g, anchor.clone())
    assert torch.equal(pulled[0], freely[0])
    assert torch.equal(pulled[1], freely[1])


@pytest.mark.parametrize("outer", [ModifiedMomentum(), SharedMomentum(0.3, 1.5)])
def test_replicas_come_together_and_reach_the_bottom(outer: GroupUpdate) -> None:
    generator = torch.Generator().manual_seed(2)
    bottom = torch.randn(10, generator=generator)
    anchors = list(torch.randn(4, 10, generator=generator))
    momenta = [torch.zeros(10) for _ in anchors]
    for round_ in range(120):
        for i, j in [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))][round_ % 3]:
            gs = [(anchors[k] - bottom) * 0.3 for k in (i, j)]
            sent = [outer.contribution(g, momenta[k]) for g, k in zip(gs, (i, j), strict=True)]
            mean, mean_anchor = (sent[0] + sent[1]) / 2, (anchors[i] + anchors[j]) / 2
            for k in (i, j):
                anchors[k], momenta[k] = outer.step(anchors[k], momenta[k], mean, mean_anchor)
    assert all(torch.allclose(anchor, bottom, atol=1e-5) for anchor in anchors)


@pytest.mark.parametrize("outer", [ModifiedMomentum(), SharedMomentum(0.3, 1.5)])
def test_results_are_fresh_and_inputs_untouched(outer: GroupUpdate) -> None:
    inputs = [torch.full((3,), float(value)) for value in range(1, 5)]
    for result in outer.step(*inputs):
        result.zero_()
    assert [t.tolist() for t in inputs] == [[1.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3]


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 9))
def test_a_step_on_a_part_is_the_part_of_a_step(size: int, cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) for _ in range(4)]
    whole = ModifiedMomentum().step(*parts)
    piece = ModifiedMomentum().step(*(part[cut:] for part in parts))
    assert torch.equal(whole[0][cut:], piece[0])
    assert torch.equal(whole[1][cut:], piece[1])


@given(st.floats(0, 0.98), st.floats(0.02, 0.98), st.floats(1, 50), st.integers(2, 9))
def test_what_diverges_is_refused_with_the_nearest_value_that_does_not(
    a: float, of_c: float, times: float, size: int
) -> None:
    largest_c = largest_stable_c(a, size)
    c = of_c * largest_c
    cases: list[tuple[str, float, Callable[[float], GroupUpdate]]] = [
        ("b", largest_stable_step(a), lambda b: SharedMomentum(a, b)),
        ("c", largest_c, lambda c: ModifiedMomentum(a, 0.001, c, size)),
        ("b", largest_stable_b(a, c, size), lambda b: ModifiedMomentum(a, b, c, size)),
    ]
    for name, limit, made in cases:
        with pytest.raises(ValueError, match=rf"^{name} is .*spectral radius") as refused:
            made(times * limit)
        nearest = float(re.findall(rf"{name} = ([\d.e-]*\d)", str(refused.value))[0])
        assert 0.997 * limit < nearest < limit
        made(nearest)
        made(of_c * limit)


def test_dilocos_momentum_is_refused_with_radius_and_both_ways_out() -> None:
    assert f"{spectral_radius(0.9, 0.7):.4g}" == "1.098"
    with pytest.raises(ValueError, match="c is") as refused:
        ModifiedMomentum(a=0.9)
    assert str(refused.value) == (
        "c is 0.7: with a = 0.9 the replicas of groups of 2 would drift apart (spectral radius "
        "1.098; it must be below 1); the nearest stable value is c = 0.3796, or take a = 0.5"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": 1.0}, r"^a is 1\.0; it must be in 0\.\.1, below 1"),
        ({"a": -0.1}, r"^a is -0\.1"),
        ({"a": math.nan}, r"^a is nan"),
        ({"b": 0.0}, r"^b is 0\.0; it must be above 0"),
        ({"b": math.inf}, r"^b is inf"),
        ({"c": 0.0}, r"^c is 0\.0; it must be above 0"),
        ({"c": math.nan}, r"^c is nan"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModifiedMomentum(**settings)


MOMENTA = st.floats(0, 0.98)
SIZES = st.integers(2, 16)
SHARES = st.floats(0.02, 0.99)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("drive", [0.0, 0.8])
def test_the_recursion_is_one_round_of_many_replicas(size: int, drive: float) -> None:
    a, c, rng = 0.6, 1.1, np.random.default_rng(3)
    covariance = np.array([[2.0, -0.7], [-0.7, 1.5]])
    many = rng.multivariate_normal([0, 0], covariance, size=(400_000 // size, size))
    phi, delta = many[..., 0], many[..., 1]
    mean = phi.mean(axis=1, keepdims=True)
    delta = a * delta - drive * mean - c * (phi - mean)
    phi = phi + delta
    measured = [(phi * phi).mean(), (phi * delta).mean(), (delta * delta).mean()]
    expected = second_moments(a, c, size, drive) @ [2.0, -0.7, 1.5]
    assert measured == pytest.approx(expected.tolist(), abs=0.03)


def test_pairs_by_hand() -> None:
    a, c = 0.5, 0.7
    assert second_moments(a, c).tolist() == pytest.approx(
        np.array(
            [
                [1 - c + c * c / 2, 2 * a - a * c, a * a],
                [-c / 2 + c * c / 2, a - a * c, a * a],
                [c * c / 2, -a * c, a * a],
            ]
        )
    )


@given(MOMENTA, SIZES)
def test_the_largest_c_is_where_the_radius_is_one(a: float, size: int) -> None:
    limit = largest_stable_c(a, size)
    assert spectral_radius(a, limit, size) == pytest.approx(1, abs=1e-6)
    assert spectral_radius(a, limit * 1.01, size) > 1


@given(MOMENTA, SIZES, SHARES)
def test_all_below_the_largest_c_is_stable(a: float, size: int, share: float) -> None:
    assert spectral_radius(a, share * largest_stable_c(a, size), size) < 1


@given(MOMENTA, SIZES)
def test_larger_groups_allow_more_up_to_heavy_balls_own_limit(a: float, size: int) -> None:
    assert largest_stable_c(a, size) <= largest_stable_c(a, size + 1) <= 2 * (1 + a) + 1e-9


@given(MOMENTA, SIZES, SHARES, SHARES, st.floats(0, 1))
def test_all_below_the_largest_b_is_stable_for_any_part_of_the_way(
    a: float, size: int, share_c: float, share_b: float, part: float
) -> None:
    c = share_c * largest_stable_c(a, size)
    b = share_b * largest_stable_b(a, c, size)
    assert spectral_radius(a, c, size, drive=part * b) < 1
    assert mean_spectral_radius(a, part * b) < 1 + 1e-9


@given(MOMENTA, SIZES, SHARES)
def test_beyond_the_largest_b_something_diverges(a: float, size: int, share: float) -> None:
    c = share * largest_stable_c(a, size)
    b = 1.01 * largest_stable_b(a, c, size)
    assert max(spectral_radius(a, c, size, drive=b), mean_spectral_radius(a, b)) > 1


@given(MOMENTA, st.floats(0.01, 3.9), SIZES)
def test_where_b_equals_c_groups_do_not_matter(a: float, c: float, size: int) -> None:
    """Then m cancels out of the update, and what is left is heavy ball."""
    expected = second_moments(a, c, size, drive=c)
    assert expected == pytest.approx(second_moments(a, c, 10**12), abs=1e-6)
    assert spectral_radius(a, c, size, drive=c) == pytest.approx(
        mean_spectral_radius(a, c), abs=1e-4
    )


@given(MOMENTA)
def test_the_largest_step_is_where_the_mean_diverges(a: float) -> None:
    limit = largest_stable_step(a)
    assert mean_spectral_radius(a, limit) == pytest.approx(1, abs=1e-6)
    assert mean_spectral_radius(a, limit * 1.01) > 1
