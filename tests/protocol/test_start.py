"""The start of a run in pairs, and its draws: nobody loses its first rounds, however unevenly
the news spreads, and a pair that is ahead of the others holds nobody up."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice, product

import pytest

from murmuration.algorithms.draws import groups, membership_id
from murmuration.algorithms.plan import PRESETS
from murmuration.worker.exchange.pairwise.pair_rounds import draw_group
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Phase
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.views import member

NAMES = "abcd"
# A round takes milliseconds, news some tenths of a second.
FAST = Problem(
    layers=(211, 97),
    plan=replace(PRESETS["noloco"], inner_steps=6),
    steps=25,
    step_s=dict.fromkeys(NAMES, 0.001),
)


def fast(seed: int) -> Problem:
    return replace(FAST, seed=seed)


async def ends_without_a_lost_round(swarm: Swarm) -> None:
    await swarm.ends_at_reference()
    kinds = ("round_failed", "adopted", "skipped")
    assert not [event for peer in swarm.alive for kind in kinds for event in peer.of_kind(kind)]


@pytest.mark.parametrize(
    ("gap_s", "delay_s", "seed"),
    [
        (0.0, 0.001, 0),
        (0.0, 0.3, 1),
        (0.07, 0.05, 0),
        (0.07, 0.3, 1),
        (0.4, 0.001, 1),
        (0.4, 0.3, 0),
    ],
)
async def test_all_are_in_the_first_round(gap_s, delay_s, seed):
    """Each is started some time after the one before."""
    async with Swarm(fast(seed), delay_s=delay_s) as swarm:
        for name in NAMES:
            others = [other for other in NAMES if other != name]
            await swarm.join(name, via=others, min_peers=4)
            await swarm.sleep(gap_s)
        await ends_without_a_lost_round(swarm)


@pytest.mark.parametrize(("stopped", "at_s"), [("a", 0.05), ("d", 0.35), ("a", 0.65)])
async def test_who_hears_the_news_late_is_in_the_first_round_too(stopped, at_s):
    """One peer gets no time to run for a while, about when all start. No pair meets twice running:
    two would be far enough ahead by then that who wakes up would follow them."""
    problem = next(p for p in map(fast, range(20)) if {*pairs(p, 0)}.isdisjoint(pairs(p, 1)))
    async with Swarm(problem, NAMES) as swarm:
        await swarm.sleep(at_s)
        swarm.freeze(stopped)
        await swarm.sleep(0.8)
        swarm.thaw(stopped)
        await ends_without_a_lost_round(swarm)


@pytest.mark.parametrize(("first", "seed"), [("a", 0), ("c", 1)])
async def test_who_leaves_the_start_to_another_draws_with_all_known(first, seed):
    """Only one knows how many are to come; the others would wait for more than that."""
    async with Swarm(fast(seed)) as swarm:
        for name in NAMES:
            others = [other for other in NAMES if other != name]
            await swarm.join(name, via=others, min_peers=4 if name == first else 9)
        await ends_without_a_lost_round(swarm)


async def test_who_waits_for_more_than_there_are_does_not_wait_for_ever():
    """Two have started, with others than this peer sees: it goes along some seconds later."""
    slow = replace(FAST, steps=400, step_s=dict.fromkeys(NAMES, 0.01))
    async with Swarm(slow, "ab") as swarm:
        await swarm.join("c", via="a", min_peers=9)
        await swarm.until(lambda: swarm["c"].of_kind("started") != [], 4)
        await swarm.finished()
        assert {peer.versions for peer in swarm.alive} == {swarm["a"].versions}


async def test_who_freezes_before_the_start_holds_the_others_up_for_a_moment():
    async with Swarm(FAST, NAMES) as swarm:
        others = [swarm[name] for name in "abc"]
        known = {"peer": "d", "phase": "ready", "health": "alive"}.items()
        await swarm.until(lambda: any(known <= m.items() for p in others for m in p.members), 5)
        swarm.freeze("d")
        await swarm.until(lambda: all(peer.trainer.step > 0 for peer in others), 8)
        swarm.thaw("d")
        await swarm.ends_equal()


PLAN = replace(PRESETS["noloco"], inner_steps=5, consensus=False)
ROUNDS = 4
LAST = ROUNDS - 1

Group = tuple[str, ...]


def pairs(problem: Problem, round_: int) -> list[Group]:
    return sorted(groups(problem.manifest.run, 0, round_, membership_id(NAMES), NAMES))


def problems() -> Iterator[Problem]:
    return (Problem(plan=PLAN, steps=5 * ROUNDS, seed=seed) for seed in count())


def with_the_same_pairs_in_the_end(how_many: int) -> list[Problem]:
    """In the last two rounds, and not in the one before."""
    found = (p for p in problems() if pairs(p, LAST - 2) != pairs(p, LAST - 1) == pairs(p, LAST))
    return list(islice(found, how_many))


def group(problem: Problem, me: str, view: View, round_: int) -> Group:
    return draw_group(me, problem.manifest.run, 2, view, (0, round_))


@pytest.mark.parametrize("problem", with_the_same_pairs_in_the_end(2), ids=lambda p: str(p.seed))
def test_a_draw_is_the_same_whoever_is_known_to_have_ended_the_run(problem):
    two = pairs(problem, LAST)
    for ahead, behind in (two, two[::-1]):
        for phases in product((Phase.TRAINING, Phase.DONE), repeat=2):
            members = [member(peer, versions=(LAST - 1,)) for peer in behind]
            for peer, phase in zip(ahead, phases, strict=True):
                members.append(member(peer, phase=phase, versions=(ROUNDS,)))
            view = View({each.peer: each for each in members})
            assert {group(problem, peer, view, LAST - 1) for peer in behind} == {behind}


def test_who_is_drawn_with_one_that_has_ended_the_run_is_alone_in_that_round():
    (problem,) = with_the_same_pairs_in_the_end(1)
    me, other = pairs(problem, 0)[0]
    members = {peer: member(peer, phase=Phase.DONE, versions=(ROUNDS,)) for peer in NAMES}
    assert group(problem, me, View(members | {me: member(me)}), 0) == (me,)
    both = View(members | {me: member(me), other: member(other)})
    assert group(problem, me, both, 0) == (me, other)


@pytest.mark.parametrize(("slow", "step_s"), [(0, 0.2), (1, 0.4), (0, 0.6)])
async def test_the_slow_end_where_the_reference_does(slow, step_s):
    """The news that the others have ended the run comes as the last rounds of the slow begin, a
    little before, or a little after."""
    problem = with_the_same_pairs_in_the_end(2)[-1]
    await assert_reference(problem, dict.fromkeys(pairs(problem, LAST)[slow], step_s))


@pytest.mark.parametrize(("slow", "step_s"), [(0, 0.5), (1, 0.3)])
async def test_the_slow_hold_their_round_while_others_meet_twice(slow, step_s):
    problem = next(p for p in problems() if pairs(p, 0) == pairs(p, 1) != pairs(p, 2))
    await assert_reference(problem, dict.fromkeys(pairs(problem, 0)[slow], step_s))


async def assert_reference(problem: Problem, step_s: Mapping[str, float]) -> None:
    """All end there when some take so long for a step, and no round is lost."""
    async with Swarm(replace(problem, step_s=step_s), NAMES) as swarm:
        await swarm.ends_at_reference()
        for peer in swarm.alive:
            assert [peer.of_kind("round_failed"), peer.of_kind("skipped")] == [[], []]
            assert {event["contributors"] for event in peer.of_kind("round")} == {2}
