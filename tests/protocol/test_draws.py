"""A pair that meets twice running gets two rounds ahead of the others, through no fault of theirs.

Where that is in the end, it has ended the run before them, and is heard of at different times. The
others must find each other all the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice, product

import pytest

from murmuration.algorithms.pairing import groups as drawn
from murmuration.algorithms.pairing import membership_epoch
from murmuration.algorithms.plan import PRESETS
from murmuration.worker.exchange.pairwise.pair_rounds import draw_group
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Phase
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.views import member
from tests.protocol.virtual_time import run

PEERS = "abcd"
PLAN = replace(PRESETS["noloco"], inner_steps=5, consensus=False)
ROUNDS = 4
LAST = ROUNDS - 1

Group = tuple[str, ...]


def pairs(problem: Problem, round_: int) -> list[Group]:
    return sorted(drawn(problem.manifest.run, 0, round_, membership_epoch(PEERS), PEERS))


def problems() -> Iterator[Problem]:
    return (Problem(plan=PLAN, steps=5 * ROUNDS, seed=seed) for seed in count())


def with_the_same_pairs_in_the_end(how_many: int) -> list[Problem]:
    """In the last two rounds, and not in the one before."""
    found = (p for p in problems() if pairs(p, LAST - 2) != pairs(p, LAST - 1) == pairs(p, LAST))
    return list(islice(found, how_many))


def group(problem: Problem, me: str, view: View, round_: int) -> Group:
    """As the peer draws it."""
    return draw_group(me, problem.manifest.run, 2, view, (0, round_))


@pytest.mark.parametrize("problem", with_the_same_pairs_in_the_end(4), ids=lambda p: str(p.seed))
def test_a_draw_is_the_same_whoever_is_known_to_have_ended_the_run(problem: Problem) -> None:
    two = pairs(problem, LAST)
    for ahead, behind in (two, two[::-1]):
        for phases in product((Phase.TRAINING, Phase.DONE), repeat=2):
            members = [member(peer, versions=(LAST - 1,)) for peer in behind]
            for peer, phase in zip(ahead, phases, strict=True):
                members.append(member(peer, phase=phase, versions=(ROUNDS,)))
            view = View({each.peer: each for each in members})
            assert {group(problem, peer, view, LAST - 1) for peer in behind} == {behind}


def test_who_is_drawn_with_one_that_has_ended_the_run_is_alone_in_that_round() -> None:
    (problem,) = with_the_same_pairs_in_the_end(1)
    me, other = pairs(problem, 0)[0]
    members = {peer: member(peer, phase=Phase.DONE, versions=(ROUNDS,)) for peer in PEERS}
    assert group(problem, me, View(members | {me: member(me)}), 0) == (me,)
    assert group(problem, me, View(members | {me: member(me), other: member(other)}), 0) == (
        me,
        other,
    )


@pytest.mark.parametrize("step_s", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("slow", [0, 1], ids=["one pair", "the other"])
def test_the_slow_end_where_the_reference_does(slow: int, step_s: float) -> None:
    """That the others have ended the run is heard of as the last rounds of the slow begin, a little
    before, or a little after."""
    problem = with_the_same_pairs_in_the_end(2)[-1]
    assert_reference(problem, dict.fromkeys(pairs(problem, LAST)[slow], step_s))


@pytest.mark.parametrize("step_s", [0.3, 0.5])
@pytest.mark.parametrize("slow", [0, 1], ids=["one pair", "the other"])
def test_the_slow_hold_their_round_while_the_others_meet_twice(slow: int, step_s: float) -> None:
    problem = next(p for p in problems() if pairs(p, 0) == pairs(p, 1) != pairs(p, 2))
    assert_reference(problem, dict.fromkeys(pairs(problem, 0)[slow], step_s))


def assert_reference(problem: Problem, step_s: Mapping[str, float]) -> None:
    """All end there when some take so long for a step, and no round is lost."""

    async def scenario() -> None:
        async with Swarm(replace(problem, step_s=step_s)) as swarm:
            await swarm.start(*PEERS)
            await swarm.finished()
            swarm.assert_reference()
            for peer in swarm.alive:
                assert [peer.of_kind("round_failed"), peer.of_kind("skipped")] == [[], []]
                assert {event["contributors"] for event in peer.of_kind("round")} == {2}

    run(scenario())
