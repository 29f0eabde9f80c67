"""Outer steps of groups, and when their replicas come together."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st

from murmuration.algorithms.noloco import (
    GroupUpdate,
    ModifiedMomentum,
    SharedMomentum,
    largest_stable_b,
    largest_stable_c,
    largest_stable_step,
    mean_spectral_radius,
    spectral_radius,
)


def test_two_steps_by_hand():
    outer, one = ModifiedMomentum(a=0.5, b=0.25, c=0.5), torch.tensor
    anchor, momentum = outer.step(one([8.0]), one([0.0]), one([4.0]), one([6.0]))
    assert (anchor.item(), momentum.item()) == (8 - 0.25 * 4 - 0.5 * 2, -2.0)
    anchor, momentum = outer.step(anchor, momentum, one([-8.0]), one([10.0]))
    assert (anchor.item(), momentum.item()) == (6 - 1 + 2 + 2, 3.0)


def test_it_is_the_papers_update_with_d_for_minus_g():
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


@given(st.floats(0, 0.98), st.floats(0.02, 0.98), st.floats(1, 50), st.integers(2, 9))
def test_what_diverges_is_refused_with_the_nearest_value_that_does_not(a, of_c, times, size):
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


def test_dilocos_momentum_is_refused_with_radius_and_both_ways_out():
    assert f"{spectral_radius(0.9, 0.7):.4g}" == "1.098"
    with pytest.raises(ValueError, match="c is") as refused:
        ModifiedMomentum(a=0.9)
    assert str(refused.value) == (
        "c is 0.7: with a = 0.9 the replicas of groups of 2 would drift apart (spectral radius "
        "1.098; it must be below 1); the nearest stable value is c = 0.3796, or take a = 0.5"
    )


MOMENTA = st.floats(0, 0.98)
SIZES = st.integers(2, 16)


@given(MOMENTA, SIZES)
def test_the_largest_c_is_where_the_radius_is_one(a, size):
    limit = largest_stable_c(a, size)
    assert spectral_radius(a, limit, size) == pytest.approx(1, abs=1e-6)
    assert spectral_radius(a, limit * 1.01, size) > 1


@given(MOMENTA, SIZES, st.floats(0.02, 0.99))
def test_beyond_the_largest_b_something_diverges(a, size, share):
    c = share * largest_stable_c(a, size)
    b = 1.01 * largest_stable_b(a, c, size)
    assert max(spectral_radius(a, c, size, drive=b), mean_spectral_radius(a, b)) > 1
