"""No peer moves a mean by more than the limit, and one that tries again and again is left out."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from murmuration.algorithms.robust import (
    Directions,
    Quarantine,
    UsualNorms,
    aggregate,
    least_factor,
    limit_of,
    most_norm,
    norm,
    norm_factors,
    norm_ratios,
    taken_out,
    trimmed_mean,
)

NORMS = st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=9)  # of fp32
SEEDS = st.integers(0, 2**32 - 1)


def contributions(count: int, seed: int, size: int = 17) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@given(NORMS, st.floats(1, 10))
def test_no_contribution_counts_more_than_the_limit(norms, limit):
    factors, median = norm_factors(norm_ratios(norms), limit), sorted(norms)[(len(norms) - 1) // 2]
    limit = limit_of(limit, len(norms))
    for each, factor in zip(norms, factors, strict=True):
        assert 0 < factor <= 1
        if len(norms) >= 3 and median > 0:
            assert each * factor <= limit * median * 1.001
            assert (factor == 1) == (each / median <= limit)
        else:
            assert factor == 1


def test_a_norm_of_many_values_is_as_exact_as_those_of_its_parts():
    assert norm(torch.full((20_000_000,), 0.1)) == pytest.approx(0.1 * math.sqrt(2e7), 1e-4)


@given(
    st.lists(st.integers(1, 20), max_size=6),
    st.floats(0.5, 1),
    st.floats(0, 99),
    st.integers(1, 20),
)
def test_honest_work_counts_whatever_it_is_and_no_claim_of_work_gains(works, power, lie, claim):
    """Two or more have made all the steps that there are. Norms grow as a power of work."""
    works, counted = [20, 20, *works], []
    norms = [*(work**power for work in works), lie]
    for said in (claim, 20):
        factors = norm_factors(norm_ratios(norms, [*works, said]), 3.0)
        assert factors[:-1] == (1.0,) * len(works)
        assert least_factor(norms[0], norms, 0, 3.0) <= factors[0]
        counted.append(factors[-1] * lie)
        assert max(*norms[:-1], counted[-1]) <= most_norm(norms, [*works, said], 0, 3.0, 20)
    assert counted[0] <= counted[1]
    assert counted[1] <= 3 * norms[0] * 1.001 or 2 * works.count(20) <= len(norms)


@given(st.integers(3, 9), SEEDS, st.sampled_from([-1e9, 1e9]))
def test_the_trimmed_mean_lies_among_the_others(count, seed, value):
    each = contributions(count, seed)
    honest, attacked = torch.stack(each[1:]), [torch.full((17,), value), *each[1:]]
    trimmed = aggregate(attacked, [1.0] * count, aggregation="trimmed")
    assert torch.equal(trimmed, trimmed_mean(attacked))
    assert (trimmed >= honest.min(dim=0).values - 1e-6).all()
    assert (trimmed <= honest.max(dim=0).values + 1e-6).all()


@given(size=st.floats(0.1, 9.9), limit=st.floats(1, 6), rounds=st.integers(1, 60))
def test_what_a_replica_keeps_of_itself_never_puts_it_in_quarantine(size, limit, rounds):
    """A peer that is always `size` medians large, and contributes what it has kept as well."""
    quarantine, kept = Quarantine(), 0.0
    for round_ in range(rounds):
        contributed = size + kept
        quarantine.saw(0, round_, {"a": contributed}, limit)
        factor, *_ = norm_factors([contributed] * 20, limit)
        kept = (1 - taken_out(factor)) * contributed
        assert factor * contributed + kept <= contributed * (1 + 1e-9)
        assert kept <= limit * (1 + 1e-9)
    assert not quarantine.peers


def test_a_liar_is_out_after_twelve_ordinary_rounds_and_then_after_twice_as_many():
    quarantine, round_ = Quarantine(), 0
    for rounds in (12, 24):
        assert quarantine.caught("a")
        assert not quarantine.caught("a")
        for _ in range(rounds):
            assert quarantine.liars == quarantine.peers == {"a"}
            quarantine.saw(0, round_, {"a": 1.0, "b": 1.0})
            round_ += 1
        assert quarantine.liars == quarantine.peers == frozenset()


@pytest.mark.parametrize(
    ("norms", "missing", "most"),
    [
        ([1.0, 2.0, 1.0, 50.0], 0, 1.5),
        ([1.0] * 6, 2, 12.0),  # which may have four times the work
        ([1.0, 2.0, 1.0], 1, 1.5),
        ([1.0] * 6, 1, 3.0),
        ([1.0, 2.0], 0, 2.0),
        ([1.0, 2.0], 1, math.inf),
        ([0.0, 0.0, 1.0], 1, math.inf),
        ([], 0, math.inf),
    ],
)
def test_the_largest_norm_of_a_mean(norms, missing, most):
    assert most_norm(norms, [5] * len(norms), missing, 3.0, 20) == pytest.approx(most)


@pytest.mark.parametrize("ratio", [11.0, 1e9, float("inf")])
def test_three_far_rounds_put_a_peer_in_quarantine_and_ordinary_ones_let_it_out(ratio):
    quarantine = Quarantine()
    rounds = [(0, number, ratio) for number in (0, 0, 0, 0, 1, 1, 2)]  # shards of one count once
    rounds += [(0, 3, 1.0), (1, 0, 1.0), (1, 1, 1.0)]
    there = []
    for fragment, round_, of_b in rounds:
        quarantine.saw(fragment, round_, {"a": 1.0, "b": of_b})
        there.append(quarantine.peers)
    assert there == [set()] * 6 + [{"b"}] * 3 + [set()]


def test_a_partner_counts_as_far_as_usual_contributions():
    usual = UsualNorms()
    with pytest.raises(ValueError, match="no contribution is known"):
        usual.factor(0, 5.0, 3.0, None)
    assert usual.factor(0, 0.0, 3.0, None) == usual.factor(0, 5.0, 0.0, None) == 1
    assert usual.factor(0, 5.0, 3.0, 0.0) == 1  # of no contributions there is no limit
    assert usual.factor(0, 6.0, 1.5, 2.0) == 0.5
    usual.saw(0, [2.0, 1e-9, 1e-9, 4.0], 4.0)
    assert usual.factor(0, 12.0, 3.0, None) == 0.5  # the upper one in the middle
    usual.saw(0, [1e-9] * 16, 1e-9)
    assert usual.factor(0, 3.0, 3.0, None) == 0.25  # a part of its own largest


@pytest.mark.parametrize(("count", "by"), [(3, ()), (4, ()), (16, ()), (4, (1, 0.2, 1, 1))])
def test_a_peer_that_points_against_those_that_agree_is_told_of_in_the_fifth_round(count, by):
    peers, common = tuple("abcdefghijklmnop"[:count]), torch.ones(1000)
    directions, told = Directions(), []
    for round_ in range(12):
        values = [common + each for each in contributions(count, round_, 1000)]
        values[1] *= -limit_of(3.0, count) if round_ % 3 or count == 3 else 1
        told += [(round_, *each) for each in directions.saw(0, peers, [values], *by)]
    ((round_, peer, cosine, much),) = told
    assert (round_, peer, much) == ((7, "b", not by) if count > 3 else (6, "b", False))
    assert -1 < cosine < -0.5


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_nobody_points_against_the_others_where_all_or_none_agree(common):
    """Near the optimum of unequal data all contributions sum to nothing."""
    directions = Directions()
    for round_ in range(40):
        values = torch.stack(contributions(4, round_, 1000))
        values += common - values.mean(dim=0)
        assert directions.saw(0, tuple("abcd"), [values]) == []
        assert directions.saw(1, tuple("ab"), [[values[0], -values[0]]]) == []


@pytest.mark.parametrize("size", [0.2, 0.9, 1.5, 5.0])
@pytest.mark.parametrize("count", [3, 4, 8, -4, -8])
def test_no_peer_makes_another_point_against_the_rest(count, size):
    peers, directions = tuple("abcdefgh"[: abs(count)]), Directions()
    for round_ in range(40):
        common, *own = contributions(abs(count), round_, 4000)
        pull = 0.4 * common if count > 0 else -sum(own) / len(own)  # unequal data, at the optimum
        values = [each + pull for each in own]
        *rest, framed = (each / each.norm() for each in values)
        values.append(sum(rest) / len(peers) ** 0.5 - framed)
        values[-1] *= size * values[0].norm() / values[-1].norm()
        assert all(peer == peers[-1] for peer, *_ in directions.saw(0, peers, [values]))
