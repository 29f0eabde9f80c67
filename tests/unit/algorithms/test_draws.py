"""Reducers and pairs: everyone computes the same, loads are even, and turns are kept."""

from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given, settings, strategies as st

from murmuration.algorithms.draws import groups, membership_id, reducer_orders, separated, weight

NAMES = st.text("abcdé猫 ", min_size=1, max_size=12)
SWARMS = st.lists(NAMES, min_size=2, max_size=14, unique=True)
U64 = st.integers(0, 2**64 - 1)
ROUNDS = st.integers(0, 10**6)
SIZES = st.integers(2, 5)


@given(U64, st.integers(0, 100), ROUNDS, U64, SWARMS, SIZES)
def test_each_peer_is_in_one_group_or_in_none(run, fragment, round_, membership, peers, size):
    made, together = groups(run, fragment, round_, membership, peers, size), min(size, len(peers))
    members = [peer for group in made for peer in group]
    assert len(set(members)) == len(members)
    assert set(members) <= set(peers)
    assert [len(group) for group in made] == [together] * (len(peers) // together)
    assert all(group == tuple(sorted(group)) for group in made)


@settings(max_examples=30)
@given(U64, SWARMS, SIZES, ROUNDS)
def test_sitting_out_goes_by_turns(run, peers, size, first):
    """In as many rounds as there are peers, each sits out as often; never twice running."""
    membership, before = membership_id(peers), set[str]()
    count: Counter[str] = Counter(dict.fromkeys(peers, 0))
    for round_ in range(first, first + len(peers)):
        outside = set(peers).difference(*groups(run, 0, round_, membership, peers, size))
        assert not outside & before
        count.update(outside)
        before = outside
    assert set(count.values()) == {len(peers) % min(size, len(peers))}


@pytest.mark.parametrize("peers", [2, 3, 8, 9])
def test_every_two_peers_meet_about_equally_often(peers):
    swarm, rounds = [f"peer-{index:02d}" for index in range(peers)], 400 * peers
    met: Counter[tuple[str, ...]] = Counter()
    for round_ in range(rounds):
        met.update(groups(7, 0, round_, membership_id(swarm), swarm))
    expected = rounds * (peers // 2) / len(list(combinations(swarm, 2)))
    assert set(met) == set(combinations(swarm, 2))
    assert all(0.8 * expected < times < 1.2 * expected for times in met.values())


def test_groups_are_the_same_on_every_machine_and_version():
    """Two versions that disagree here would wait for each other's partners."""
    assert membership_id(["a", "b", "c"]) == 72537297551412712
    assert groups(1, 2, 3, 4, [*"abcde"]) == (("c", "d"), ("a", "b"))
    assert groups(1, 2, 3, 4, [*"abcdefg"], 3) == (("c", "d", "f"), ("a", "b", "e"))


PEERS = "abcdefghijkl"


@st.composite
def drawn_groups(draw: st.DrawFn) -> list[list[str]]:
    size = draw(st.integers(2, 4))
    order = draw(st.permutations(PEERS[: size * draw(st.integers(1, 3))]))
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


PAIRS = st.frozensets(st.sampled_from(list(combinations(PEERS, 2))), max_size=12)


@given(drawn_groups(), PAIRS)
def test_nobody_is_with_whom_it_does_not_reach(groups, unreachable):
    before = [list(group) for group in groups]
    made = separated(groups, unreachable)
    assert groups == before
    members = [*chain.from_iterable(made)]
    together = {pair for group in made for pair in combinations(sorted(group), 2)}
    assert not together & unreachable
    assert len(set(members)) == len(members)
    assert set(members) <= set(chain.from_iterable(groups))
    assert all(1 < len(group) <= len(groups[0]) for group in made)


@pytest.mark.parametrize(
    ("drawn", "unreachable", "bench", "made"),
    [
        (["ab"], "ab", "", []),  # a pair with nobody else sits out
        (["abcd"], "ac bc", "", ["abd"]),  # who reaches fewest leaves
        (["abc"], "ab", "", ["bc"]),  # of two alike, by the order that was drawn
        (["bac"], "ab", "", ["ac"]),
        (["ab"], "ab", "c", ["cb"]),  # who would sit out takes a place
        (["ab"], "ab bc", "c", ["ac"]),
        (["ab"], "ab bc ac", "c", []),
        (["ab", "cd"], "ab ac ad", "", ["cd"]),  # who reaches nobody, with its partner alone
    ],
)
def test_who_changes_places_and_who_sits_out(drawn, unreachable, bench, made):
    pairs = {(one, other) for one, other in unreachable.split()}
    assert separated(drawn, pairs, bench) == [list(group) for group in made]


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
