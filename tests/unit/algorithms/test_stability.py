"""Second moments of NoLoCo's replicas: the recursion is the update's, and the limits hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.noloco import (
    largest_stable_b,
    largest_stable_c,
    largest_stable_step,
    mean_spectral_radius,
    second_moments,
    spectral_radius,
)
from tests.bench.stability import (
    BAND,
    Point,
    growth,
    members_of_groups,
    paper_bounds,
    shared_growth,
    shared_spectral_radius,
)

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


@pytest.mark.parametrize(("a", "limit"), [(0.0, 2.0), (0.5, 1.5), (0.9, 0.38)])
def test_limits_of_pairs(a: float, limit: float) -> None:
    assert largest_stable_c(a) == pytest.approx(limit)


def test_the_papers_values_are_stable_and_dilocos_momentum_is_not() -> None:
    assert spectral_radius(0.5, 0.7) < 1
    assert spectral_radius(0.9, 0.7) > 1


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


def test_the_papers_bounds_admit_what_diverges_and_refuse_what_does_not() -> None:
    assert paper_bounds(0.5) == pytest.approx((0.5, 1.5))
    low, high = paper_bounds(0.9)
    assert low > largest_stable_c(0.9)
    assert high == pytest.approx(math.sqrt(2.81))
    assert spectral_radius(0.9, 0.3) < 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("a", "c"), [(0.5, 0.7), (0.5, 1.2), (0.2, 2.4), (0.8, 0.4), (0.9, 1.2), (0.95, 1.2)]
)
def test_64_replicas_do_as_the_radius_says(a: float, c: float, size: int) -> None:
    members = [members_of_groups(size, round_) for round_ in range(250)]
    point = Point(a, c, growth(a, c, members), spectral_radius(a, c, size))
    assert point.agrees
    assert not point.in_band
    assert point.measured == pytest.approx(point.exact, abs=2 * BAND)


@given(MOMENTA)
def test_the_largest_step_is_where_the_mean_diverges(a: float) -> None:
    limit = largest_stable_step(a)
    assert mean_spectral_radius(a, limit) == pytest.approx(1, abs=1e-6)
    assert mean_spectral_radius(a, limit * 1.01) > 1


@given(MOMENTA, SIZES, SHARES)
def test_sharing_momentum_brings_replicas_together_faster_than_their_mean_converges(
    a: float, size: int, share: float
) -> None:
    drive = share * largest_stable_step(a)
    assert shared_spectral_radius(a, size, drive) < mean_spectral_radius(a, drive) <= 1 + 1e-9
    assert shared_spectral_radius(a, size) == pytest.approx(1 / size)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("a", "drive"), [(0.0, 1.5), (0.3, 1.5), (0.3, 2.8), (0.9, 0.5)])
def test_64_replicas_that_share_their_momentum_do_as_the_radius_says(
    a: float, drive: float, mean: bool
) -> None:
    members = [members_of_groups(2, round_) for round_ in range(250)]
    measured = shared_growth(a, drive, members, mean=mean)
    exact = mean_spectral_radius(a, drive) if mean else shared_spectral_radius(a, 2, drive)
    assert measured == pytest.approx(exact, abs=2 * BAND)
