"""Reducers: everyone computes the same, and loads are even."""

from collections import Counter

import pytest

from murmuration.algorithms.reducers import next_group, reached_by_all, reducer_orders, weight


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
def test_reached_by_all(group, unreachable, reached):
    """At least a third of the group: one that hardly anybody reaches does not count."""
    pairs = {(one, other) for one, other in unreachable.split()}
    assert reached_by_all(group, pairs) == set(reached)


EIGHT = [f"peer-{letter}" for letter in "abcdefgh"]


def test_the_shards_of_a_lost_peer_go_to_all_others_in_turn():
    heirs: Counter[str] = Counter()
    for fragment in range(700):
        for order in reducer_orders(7, fragment, EIGHT):
            if order[0] == "peer-c":
                heirs[order[1]] += 1
    assert set(heirs) == set(EIGHT) - {"peer-c"}
    assert all(60 <= count <= 145 for count in heirs.values())  # 100 on average


def test_weights_are_the_same_on_every_machine_and_version():
    """Two versions that disagree here would send one shard to two reducers."""
    assert weight(b"key", "peer") == 15262365844821319713
    orders = reducer_orders(1, 2, ["a", "b", "c"])
    assert orders == (("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a"))


@pytest.mark.parametrize(
    ("group", "contributors", "joiners", "found"),
    [
        pytest.param("abcd", "abcd abcd abcd abcd", "", "abcd", id="all"),
        pytest.param("abcd", "abcd abcd abcd d", "", "abcd", id="one counts itself alone"),
        pytest.param("abcd", "abc abc abc abcd", "", "abc", id="one counts somebody unseen"),
        pytest.param("ab", "ab b", "", "ab", id="of two"),
        pytest.param("abc", "abc abc ab", "x", "abcx", id="a joiner"),
        pytest.param("abc", "abc abc abx", "", "abc", id="an outsider that is counted"),
        pytest.param("abc", "dd d d", "", "d", id="the group is gone"),
    ],
)
def test_the_next_group_is_what_most_shards_have_counted(group, contributors, joiners, found):
    assert next_group(group, contributors.split(), joiners) == tuple(found)
