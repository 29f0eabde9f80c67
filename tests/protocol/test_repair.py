"""Whose state to fetch, and to go back to; step_of_the_others: where to go on in pairs."""

from dataclasses import dataclass, replace

import pytest

from murmuration.worker.catchup.choices import (
    Repair,
    choose_repair,
    choose_return,
    step_of_the_others,
)
from murmuration.worker.catchup.donors import Electorate, Votes, electorate, most_on_a_way
from murmuration.worker.membership import Digest, Health, Member, Phase

Digests = tuple[tuple[int, int, int], ...]
TRAINING = Phase.TRAINING


def donor(
    name: str, digests: Digests, health: Health = Health.ALIVE, phase: Phase = Phase.TRAINING
) -> Member:
    return Member(
        name,
        f"{name}:1",
        start_ms=1,
        health=health,
        phase=phase,
        digests=tuple(Digest(*digest) for digest in digests),
    )


def choose(
    mine: Digests, *members: Member, failed: frozenset[int] = frozenset(), me: str = "a"
) -> Repair | None:
    return choose_repair(me, [Digest(*digest) for digest in mine], members, failed)


@dataclass(frozen=True)
class Case:
    """(version, contributors, hash) here and there, and whether there is repaired from."""

    name: str
    mine: tuple[int, int, int]
    theirs: tuple[int, int, int]
    failed: bool
    repaired: bool


CASES = [
    Case("the same state", (4, 3, 7), (4, 3, 7), False, False),
    Case("one behind is the normal course", (4, 3, 7), (5, 3, 9), False, False),
    Case("one behind after a failed round", (4, 3, 7), (5, 3, 9), True, True),
    Case("two behind", (4, 3, 7), (6, 3, 9), False, True),
    Case("far behind", (4, 3, 7), (90, 1, 0), False, True),
    Case("ahead", (5, 3, 7), (4, 3, 9), False, False),
    Case("ahead after a failed round", (5, 3, 7), (4, 3, 9), True, False),
    Case("the same version from more contributors", (4, 2, 9), (4, 3, 1), False, True),
    Case("the same version from fewer contributors", (4, 3, 1), (4, 2, 9), False, False),
    Case("a tie is for the first by name", (4, 3, 7), (4, 3, 8), False, False),
    Case("whatever the hashes are", (4, 3, 8), (4, 3, 7), False, False),
    Case("another group before the first round", (0, 0, 7), (0, 0, 8), False, False),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_fragment(case):
    failed = frozenset({0}) if case.failed else frozenset()
    repair = choose((case.mine,), donor("b", (case.theirs,)), failed=failed)
    assert (repair is not None) is case.repaired
    if repair is not None:
        assert (repair.donor.peer, repair.donor.address, repair.fragments) == ("b", "b:1", (0,))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_of_two_peers_never_both_repair(case):
    """Else they would swap states for ever."""
    both = frozenset({0})
    here = choose((case.mine,), donor("b", (case.theirs,)), failed=both)
    there = choose((case.theirs,), donor("a", (case.mine,)), failed=both, me="b")
    assert here is None or there is None
    assert (here is None and there is None) is (case.mine == case.theirs)


FAR = ((9, 3, 7),)
FULLER = ((4, 4, 1),) * 2
ONE, FOUR = ((4, 3, 7),), ((4, 3, 7),) * 4


@pytest.mark.parametrize(
    ("mine", "failed", "donors", "chosen"),
    [
        (ONE, set(), [donor("b", FAR, Health.SUSPECT)], None),
        (ONE, set(), [donor("b", FAR, Health.DEAD)], None),
        (ONE, set(), [donor("b", FAR, Health.LEFT)], None),
        (ONE, set(), [donor("b", FAR, phase=Phase.STARTING)], None),
        (ONE, set(), [donor("b", FAR, phase=Phase.READY)], None),
        (ONE, set(), [donor("b", FAR, phase=Phase.TRAINING)], ("b", (0,))),
        (ONE, set(), [donor("b", FAR, phase=Phase.DONE)], ("b", (0,))),
        (ONE, set(), [donor("b", ())], None),
        (ONE, set(), [], None),
        # Only the fragments that need it.
        (FOUR, {1, 3}, [donor("b", ((5, 3, 1), (5, 3, 1), (4, 4, 1), (3, 9, 9)))], ("b", (1, 2))),
        # One that is overtaken fetches all that belongs to the donor's step.
        (FOUR[:3], set(), [donor("b", ((5, 3, 1), (6, 3, 1), (4, 3, 7)))], ("b", (0, 1, 2))),
        # The state that more peers hold wins, whatever the contributors say.
        (ONE, set(), [donor("b", ((4, 4096, 9),)), donor("c", ((4, 3, 7),))], None),
        # The donor of most fragments, and of equal ones the most advanced.
        (FOUR[:2], set(), [donor("b", ((4, 9, 1), (3, 3, 7))), donor("c", FULLER)], ("c", (0, 1))),
        (ONE, set(), [donor("b", ((6, 3, 1),)), donor("c", FAR)], ("c", (0,))),
    ],
)
def test_whose_state_is_fetched(mine, failed, donors, chosen):
    for members in (donors, donors[::-1]):
        repair = choose(mine, *members, failed=frozenset(failed))
        assert (repair and (repair.donor.peer, repair.fragments)) == chosen


def test_the_state_that_more_peers_hold_is_fetched():
    """One peer alone cannot outweigh two by a number of contributors."""
    repair = choose(((4, 4096, 9),), donor("a", ONE), donor("c", ONE), me="d")
    assert repair is not None
    assert repair.donor.digests[0].hash == 7


def step_seen(mine: Digests, *members: Member) -> int | None:
    return step_of_the_others([Digest(*digest) for digest in mine], members)


def at_step(step: int, *versions: int, **changes: object) -> Member:
    member = donor(f"p{step}", tuple((version, 2, step) for version in versions))
    return replace(member, step=step, **changes)


MINE = ((4, 2, 0), (3, 2, 0))


@pytest.mark.parametrize(
    ("versions", "step"),
    [((6, 5), 40), ((9, 9), 40), ((6, 4), None), ((5, 5), None), ((4, 3), None)],
)
def test_two_rounds_ahead_in_all_is_far_ahead(versions, step):
    assert step_seen(MINE, at_step(40, *versions)) == step


def test_most_of_the_others_must_be_far_ahead():
    ahead, beside = at_step(40, 8, 7), at_step(20, 4, 3)
    assert step_seen(MINE, ahead, beside) is None
    assert step_seen(MINE, ahead, beside, at_step(43, 8, 8)) == 40
    assert step_seen(MINE, ahead, at_step(43, 8, 8), at_step(900, 8, 8)) == 43, "one alone is there"
    assert step_seen(MINE, ahead, at_step(20, 4, 3, health=Health.SUSPECT)) == 40
    assert step_seen(MINE, ahead, at_step(20, 4, 3, phase=Phase.READY)) == 40


@pytest.mark.parametrize(
    "changes",
    [{"health": Health.SUSPECT}, {"health": Health.LEFT}, {"phase": Phase.DONE}],
    ids=["in doubt", "left", "done"],
)
def test_only_who_trains_here_and_now_says_where_to_go_on(changes):
    assert step_seen(MINE, at_step(40, 8, 7, **changes)) is None


def test_a_peer_with_other_fragments_says_nothing():
    assert step_seen(MINE, at_step(40, 8)) is None
    assert step_seen(MINE) is None


@pytest.mark.parametrize(
    ("partner", "step"),
    [(at_step(20, 4, 3), None), (at_step(20, 5, 3), None), (at_step(20, 5, 4), 40)],
    ids=["beside", "beside in one fragment", "past it"],
)
def test_nobody_leaves_a_partner_that_is_no_further(partner, step):
    mine, ahead = [Digest(*each) for each in MINE], (at_step(40, 8, 7), at_step(43, 8, 8))
    assert step_of_the_others(mine, (*ahead, partner)) == 40
    assert step_of_the_others(mine, (*ahead, partner), {partner.peer}) == step
    gone = replace(partner, health=Health.SUSPECT)
    assert step_of_the_others(mine, (*ahead, gone), {gone.peer}) == 40


def going_back(
    *members: Member, own: dict[int, int], mine: int = 9, ended: bool = False
) -> Repair | None:
    """This peer is at version `mine`, and was at those in `own`, by their hashes."""
    digest = Digest(mine, 1, 99)
    return choose_return([digest], members, lambda _, version: own.get(version, 0), ended=ended)


def test_a_peer_that_went_on_alone_goes_back_to_what_most_share():
    others = [donor("c", ((5, 2, 7),)), donor("b", ((5, 2, 7),))]
    repair = going_back(*others, own={5: 8})
    assert repair is not None
    assert (repair.donor.peer, repair.fragments) == ("b", (0,))
    assert repair.reason == "most peers share another history, at version 5"


@pytest.mark.parametrize(
    ("members", "own", "why"),
    [
        (((5, 2, 7), (5, 2, 7)), {5: 7}, "they are behind, on the same way"),
        (((5, 2, 7), (5, 2, 7)), {}, "what this peer had then is forgotten"),
        (((9, 2, 7), (9, 2, 7)), {9: 99}, "as far: that is a repair"),
        (((5, 2, 7), (5, 2, 6)), {5: 8}, "they do not agree"),
        (((5, 2, 7), (5, 2, 7), (9, 1, 99), (9, 1, 99)), {5: 8}, "two of five"),
        (((5, 2, 7),), {5: 8}, "one of two"),
        ((), {5: 8}, "nobody"),
    ],
)
def test_else_it_stays(members, own, why):
    others = [donor(f"p{place}", (digest,)) for place, digest in enumerate(members)]
    assert going_back(*others, own=own) is None, why


def test_a_smaller_side_goes_back_as_well():
    others = [donor(name, ((5, 2, 7),)) for name in "cde"]
    repair = going_back(donor("b", ((9, 2, 99),)), *others, own={5: 8})
    assert repair is not None
    assert repair.donor.peer == "c"


def test_at_the_end_a_peer_that_is_ahead_of_most_goes_back():
    """Nobody comes to where it is any more."""
    others = [donor(name, ((8, 2, 7),), phase=Phase.DONE) for name in "bc"]
    assert going_back(*others, own={8: 7}) is None
    assert going_back(*others, own={8: 7}, ended=True) is not None


def voters(
    *members: Member, contributors: str = "", mine: Digests = ((5, 2, 7),), phase: Phase = TRAINING
) -> tuple[str, bool]:
    found = electorate([Digest(*each) for each in mine], phase, members, contributors)
    return "".join(member.peer for member in found.others), found.counts_me


TRAINS, ENDED, WAITS = (
    [donor(name, ((5, 2, 7),), phase=phase) for name in names]
    for phase, names in ((TRAINING, "bc"), (Phase.DONE, "de"), (Phase.READY, "fg"))
)


def test_those_that_have_contributed_have_a_say_whatever_others_say():
    everyone = [*TRAINS, *ENDED, *WAITS]
    assert voters(*everyone, contributors="bdfz") == ("bdf", True)
    assert voters(*everyone, contributors="z") == ("bc", True)
    assert voters(*ENDED, *WAITS) == ("de", False)  # this peer has closed no round
    assert voters(donor("b", ((5, 2, 7),), Health.SUSPECT), contributors="b") == ("", True)
    assert voters(*TRAINS, *WAITS, mine=((0, 0, 7),)) == ("bcfg", True)  # nor has anybody, yet


def test_a_first_time_joiner_has_none():
    fresh = {"mine": ((0, 0, 1),), "phase": Phase.READY}
    assert voters(*TRAINS, *ENDED, **fresh) == ("bc", False)
    assert voters(*WAITS, **fresh) == ("fg", False)
    begun_again = [donor("b", ((0, 0, 1),), phase=Phase.READY)]
    assert voters(*begun_again, contributors="b", phase=Phase.READY) == ("b", True)
    assert voters(*TRAINS, contributors="b", phase=Phase.READY) == ("b", False)


def test_which_votes_are_enough():
    """A case of six, with this peer: holders, peers that stay, and undecided ones."""
    among = Electorate(tuple(donor(name, ((5, 2, 7),)) for name in "bcdef"), True, known=True)
    for holders, keepers, undecided, majority, enough, lost in (
        ("bcde", 2, 0, True, True, False),
        ("bcd", 3, 0, False, True, False),  # two halves
        ("bc", 4, 0, False, False, True),
        ("b", 5, 0, False, False, True),
        ("b", 1, 0, False, True, False),  # all differ
        ("b", 3, 3, False, False, False),  # the others may come to it yet
    ):
        votes = Votes(among, tuple(holders), keepers, undecided)
        assert (votes.majority, votes.enough, votes.lost) == (majority, enough, lost), votes


@pytest.mark.parametrize(
    ("states", "most"),
    [
        (["A1", "A1", "A2"], 3),  # left behind, or there
        (["A1", "B1", "B2"], 2),
        (["A2", "B2", "C2"], 1),
        (["A0", "A2", "B2", "C2"], 2),  # the first is left behind by each
        (["A1 A2", "A2 A1"], 2),  # each is ahead in a fragment
        (["A1 A2", "A1 B2"], 1),
    ],
)
def test_how_many_are_on_one_way(states, most):
    """A way is a letter. What a peer has had are all versions up to its own; 0 is that of all."""
    at, had = {}, {}
    for peer, each in enumerate(states):
        parts = [(ord(way), int(version)) for way, version in each.split()]
        at[str(peer)] = {i: Digest(v, 2, way * v + 1) for i, (way, v) in enumerate(parts)}
        versions = [(i, way, v) for i, (way, newest) in enumerate(parts) for v in range(newest + 1)]
        had[str(peer)] = {(i, v): way * v + 1 for i, way, v in versions}
    assert most_on_a_way(at, had) == most
