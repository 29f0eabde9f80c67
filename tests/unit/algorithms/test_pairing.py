"""Groups of a round in pairs: everyone computes the same, and turns are kept."""

from collections import Counter
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.algorithms.pairing import groups, membership_epoch, separated

NAMES = st.text("abcdé猫 ", min_size=1, max_size=12)
SWARMS = st.lists(NAMES, min_size=2, max_size=14, unique=True)
U64 = st.integers(0, 2**64 - 1)
ROUNDS = st.integers(0, 10**6)
SIZES = st.integers(2, 5)


def letters(count: int) -> list[str]:
    return [f"peer-{index:02d}" for index in range(count)]


@given(U64, st.integers(0, 100), ROUNDS, U64, SWARMS, SIZES)
def test_each_peer_is_in_one_group_or_in_none(
    run: int, fragment: int, round_: int, epoch: int, peers: list[str], size: int
) -> None:
    made = groups(run, fragment, round_, epoch, peers, size)
    together = min(size, len(peers))
    members = [peer for group in made for peer in group]
    assert len(set(members)) == len(members)
    assert set(members) <= set(peers)
    assert [len(group) for group in made] == [together] * (len(peers) // together)
    assert all(group == tuple(sorted(group)) for group in made)


@given(U64, ROUNDS, U64, SWARMS, SIZES, st.data())
def test_every_peer_computes_the_same_from_members_in_any_order(
    run: int, round_: int, epoch: int, peers: list[str], size: int, data: st.DataObject
) -> None:
    made = groups(run, 0, round_, epoch, peers, size)
    elsewhere = data.draw(st.permutations(peers))
    assert groups(run, 0, round_, epoch, elsewhere, size) == made


@given(SWARMS, st.data())
def test_the_epoch_is_of_the_set(peers: list[str], data: st.DataObject) -> None:
    epoch = membership_epoch(peers)
    assert epoch == membership_epoch([*data.draw(st.permutations(peers)), peers[0]])
    assert 0 <= epoch < 2**64
    assert epoch != membership_epoch(peers[1:])
    assert epoch != membership_epoch([*peers, "someone quite else"])


def test_the_epoch_tells_where_a_name_ends() -> None:
    assert membership_epoch(["ab", "c"]) != membership_epoch(["a", "bc"])


@settings(max_examples=30)
@given(U64, SWARMS, SIZES, ROUNDS)
def test_sitting_out_goes_by_turns(run: int, peers: list[str], size: int, first: int) -> None:
    """In as many rounds as there are peers, each sits out as often; never twice running."""
    epoch, before = membership_epoch(peers), set[str]()
    count: Counter[str] = Counter(dict.fromkeys(peers, 0))
    for round_ in range(first, first + len(peers)):
        inside = groups(run, 0, round_, epoch, peers, size)
        outside = set(peers).difference(*inside)
        assert not outside & before
        count.update(outside)
        before = outside
    assert set(count.values()) == {len(peers) % min(size, len(peers))}


@pytest.mark.parametrize(("peers", "size"), [(5, 2), (9, 2), (11, 4)])
def test_runs_fragments_and_epochs_have_turns_of_their_own(peers: int, size: int) -> None:
    """Who sits out a round of one of them sits out that of another no more than by chance."""
    swarm = letters(peers)
    draws = 4000
    count: Counter[str] = Counter()
    for draw in range(draws):
        key = [(draw, 0, 1), (7, draw, 1), (7, 0, draw)][draw % 3]
        run, fragment, epoch = key
        count.update(set(swarm).difference(*groups(run, fragment, 3, epoch, swarm, size)))
    expected = draws * (peers % size) / peers
    assert set(count) == set(swarm)
    assert all(0.8 * expected < times < 1.2 * expected for times in count.values())


@pytest.mark.parametrize("peers", [2, 3, 8, 9])
def test_every_two_peers_meet_about_equally_often(peers: int) -> None:
    swarm, rounds = letters(peers), 400 * peers
    met: Counter[tuple[str, ...]] = Counter()
    for round_ in range(rounds):
        met.update(groups(7, 0, round_, membership_epoch(swarm), swarm))
    expected = rounds * (peers // 2) / len(list(combinations(swarm, 2)))
    assert set(met) == set(combinations(swarm, 2))
    assert all(0.8 * expected < times < 1.2 * expected for times in met.values())


def test_fewer_peers_than_a_group_make_one_and_one_peer_makes_none() -> None:
    assert groups(1, 0, 0, 0, ["b", "a", "c"], 4) == (("a", "b", "c"),)
    assert groups(1, 0, 0, 0, ["a"], 4) == ()
    assert groups(1, 0, 0, 0, []) == ()


@pytest.mark.parametrize("size", [1, 0, -2])
def test_groups_of_less_than_two_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"^group size is {size}; it must be at least 2"):
        groups(1, 0, 0, 0, letters(4), size)


def test_groups_are_the_same_on_every_machine_and_version() -> None:
    """Two versions that disagree here would wait for each other's partners."""
    assert membership_epoch(["a", "b", "c"]) == 72537297551412712
    assert groups(1, 2, 3, 4, ["a", "b", "c", "d", "e"]) == (("c", "d"), ("a", "b"))
    assert groups(1, 2, 3, 4, ["a", "b", "c", "d", "e", "f", "g"], 3) == (
        ("c", "d", "f"),
        ("a", "b", "e"),
    )


@given(U64, ROUNDS, SWARMS, SIZES, st.data())
def test_two_that_do_not_reach_each_other_never_meet(
    run: int, round_: int, peers: list[str], size: int, data: st.DataObject
) -> None:
    """Nobody sits out for it where there are others."""
    one, other = data.draw(st.permutations(peers))[:2]
    pair, epoch = (min(one, other), max(one, other)), membership_epoch(peers)
    made = groups(run, 0, round_, epoch, peers, size, {pair})
    assert not any(set(pair) <= set(group) for group in made)
    assert all(group == tuple(sorted(group)) for group in made)
    drawn = groups(run, 0, round_, epoch, peers, size)
    if not any(set(pair) <= set(group) for group in drawn):
        assert made == drawn
    elif len(drawn) > 1:
        assert set().union(*made) == set().union(*drawn)
    elif len(peers) > size:
        assert len(made[0]) == size
    elsewhere = data.draw(st.permutations(peers))
    assert groups(run, 0, round_, epoch, elsewhere, size, {pair}) == made


PEERS = "abcdefghijkl"


@st.composite
def drawn_groups(draw: st.DrawFn) -> list[list[str]]:
    size = draw(st.integers(2, 4))
    order = draw(st.permutations(PEERS[: size * draw(st.integers(1, 3))]))
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


PAIRS = st.frozensets(st.sampled_from(list(combinations(PEERS, 2))), max_size=12)


def within(
    groups: list[list[str]], unreachable: frozenset[tuple[str, str]]
) -> list[tuple[str, str]]:
    pairs = chain.from_iterable(combinations(sorted(group), 2) for group in groups)
    return [pair for pair in pairs if pair in unreachable]


@given(drawn_groups(), PAIRS)
def test_nobody_is_with_whom_it_does_not_reach(
    groups: list[list[str]], unreachable: frozenset[tuple[str, str]]
) -> None:
    before = [list(group) for group in groups]
    made = separated(groups, unreachable)
    assert groups == before
    members = sorted(chain.from_iterable(made))
    assert within(made, unreachable) == []
    assert len(set(members)) == len(members)
    assert set(members) <= set(chain.from_iterable(groups))
    assert all(1 < len(group) <= len(groups[0]) for group in made)


@given(drawn_groups())
def test_groups_stay_as_they_are_where_all_reach_each_other(groups: list[list[str]]) -> None:
    assert separated(groups, frozenset()) == groups


@given(drawn_groups(), st.data())
def test_one_cut_link_costs_nobody_a_round_where_there_is_another_group(
    groups: list[list[str]], data: st.DataObject
) -> None:
    pair = data.draw(st.sampled_from(list(combinations(sorted(chain(*groups)), 2))))
    made = separated(groups, {pair})
    if len(groups) > 1:
        assert sorted(chain(*made)) == sorted(chain(*groups))
    moved = sum(before != after for before, after in zip(groups, made, strict=False))
    assert moved <= 2


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
def test_who_changes_places_and_who_sits_out(
    drawn: list[str], unreachable: str, bench: str, made: list[str]
) -> None:
    pairs = {(one, other) for one, other in unreachable.split()}
    assert separated(drawn, pairs, bench) == [list(group) for group in made]


def test_members_of_other_groups_change_before_who_would_sit_out() -> None:
    made = separated(["ab", "cd"], {("a", "b")}, bench="e")
    assert sorted(chain(*made)) == list("abcd")
