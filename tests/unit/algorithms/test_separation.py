"""Groups in which everybody reaches everybody, from groups that were drawn without a thought."""

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.grouping import reached_by_all, separated

PEERS = "abcdefghijkl"


@st.composite
def drawn(draw: st.DrawFn) -> list[list[str]]:
    size = draw(st.integers(2, 4))
    order = draw(st.permutations(PEERS[: size * draw(st.integers(1, 3))]))
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


PAIRS = st.frozensets(st.sampled_from(list(combinations(PEERS, 2))), max_size=12)


def within(
    groups: list[list[str]], unreachable: frozenset[tuple[str, str]]
) -> list[tuple[str, str]]:
    pairs = chain.from_iterable(combinations(sorted(group), 2) for group in groups)
    return [pair for pair in pairs if pair in unreachable]


@given(drawn(), PAIRS)
def test_nobody_is_with_whom_it_does_not_reach(
    groups: list[list[str]], unreachable: frozenset[tuple[str, str]]
) -> None:
    made = separated(groups, unreachable)
    members = sorted(chain.from_iterable(made))
    assert within(made, unreachable) == []
    assert len(set(members)) == len(members)
    assert set(members) <= set(chain.from_iterable(groups))
    assert all(1 < len(group) <= len(groups[0]) for group in made)


@given(drawn())
def test_groups_stay_as_they_are_where_all_reach_each_other(groups: list[list[str]]) -> None:
    assert separated(groups, frozenset()) == groups


@given(drawn(), st.data())
def test_one_cut_link_costs_nobody_a_round_where_there_is_another_group(
    groups: list[list[str]], data: st.DataObject
) -> None:
    pair = data.draw(st.sampled_from(list(combinations(sorted(chain(*groups)), 2))))
    made = separated(groups, {pair})
    if len(groups) > 1:
        assert sorted(chain(*made)) == sorted(chain(*groups))
    moved = sum(before != after for before, after in zip(groups, made, strict=False))
    assert moved <= 2


@given(drawn(), PAIRS)
def test_what_is_drawn_is_left_as_it_was(
    groups: list[list[str]], unreachable: frozenset[tuple[str, str]]
) -> None:
    before = [list(group) for group in groups]
    separated(groups, unreachable)
    assert groups == before


def test_a_pair_with_nobody_else_sits_out() -> None:
    assert separated(["ab"], {("a", "b")}) == []


def test_of_a_group_without_another_leaves_who_reaches_fewest() -> None:
    assert separated(["abcd"], {("a", "c"), ("b", "c")}) == [["a", "b", "d"]]


def test_of_two_alike_the_order_that_was_drawn_says_who_leaves() -> None:
    assert separated(["abc"], {("a", "b")}) == [["b", "c"]]
    assert separated(["bac"], {("a", "b")}) == [["a", "c"]]


def test_who_would_sit_out_takes_the_place_of_one_of_a_pair() -> None:
    assert separated(["ab"], {("a", "b")}, bench="c") == [["c", "b"]]
    assert separated(["ab"], {("a", "b"), ("b", "c")}, bench="c") == [["a", "c"]]
    assert separated(["ab"], {("a", "b"), ("b", "c"), ("a", "c")}, bench="c") == []


def test_members_of_other_groups_change_before_who_would_sit_out() -> None:
    made = separated(["ab", "cd"], {("a", "b")}, bench="e")
    assert sorted(chain(*made)) == list("abcd")


def test_who_reaches_nobody_sits_out_with_its_partner_alone() -> None:
    unreachable = {("a", "b"), ("a", "c"), ("a", "d")}
    assert separated(["ab", "cd"], unreachable) == [["c", "d"]]


# ------------------------------------------------------------------------------- reached by all


@pytest.mark.parametrize(
    ("group", "unreachable", "reached"),
    [
        ("abcd", "", "abcd"),
        ("abcd", "ab", "cd"),
        ("abc", "ab", "c"),
        ("ab", "ab", "ab"),
        ("abcd", "ab cd", "abcd"),
        ("abcdef", "ab cd", "ef"),
        ("abcdef", "ab ac ad", "ef"),
        ("abcdef", "ab ac ad ae", "abcdef"),
        ("abcdef", "ab ac ad ae ef", "abcd"),
        ("abcd", "ax bx", "abcd"),
    ],
)
def test_reached_by_all(group: str, unreachable: str, reached: str) -> None:
    """At least a third of the group: one that hardly anybody reaches does not count."""
    pairs = {(one, other) for one, other in unreachable.split()}
    assert reached_by_all(group, pairs) == set(reached)


@given(st.integers(1, 12), PAIRS)
def test_at_least_a_third_is_left(count: int, unreachable: frozenset[tuple[str, str]]) -> None:
    group = PEERS[:count]
    left = reached_by_all(group, unreachable)
    assert 3 * len(left) >= count
    assert left <= set(group)
