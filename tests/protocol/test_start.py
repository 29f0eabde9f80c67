"""The start of a run in pairs: nobody loses its first rounds, however unevenly the news spreads."""

from dataclasses import replace

import pytest

from murmuration.algorithms.pairing import groups, membership_epoch
from murmuration.algorithms.plan import PRESETS
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

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
def test_all_are_in_the_first_round(gap_s: float, delay_s: float, seed: int) -> None:
    """Each is started some time after the one before."""

    async def scenario() -> None:
        async with Swarm(fast(seed), delay_s) as swarm:
            for name in NAMES:
                others = [other for other in NAMES if other != name]
                await swarm.join(name, via=others, min_peers=4)
                await swarm.sleep(gap_s)
            await swarm.finished()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                assert peer.of_kind("adopted") == peer.of_kind("skipped") == []
            swarm.assert_reference()

    run(scenario())


@pytest.mark.parametrize("at_s", [0.05, 0.35, 0.65])
@pytest.mark.parametrize("stopped", "ad")
def test_who_hears_the_news_late_is_in_the_first_round_too(stopped: str, at_s: float) -> None:
    """One peer gets no time to run for a while, about when all start. No pair meets twice running:
    two would be far enough ahead by then that who wakes up would follow them."""

    def drawn(problem: Problem, round_: int) -> set[tuple[str, ...]]:
        return set(groups(problem.manifest.run, 0, round_, membership_epoch(NAMES), NAMES))

    async def scenario() -> None:
        problem = next(p for p in map(fast, range(20)) if drawn(p, 0).isdisjoint(drawn(p, 1)))
        async with Swarm(problem) as swarm:
            await swarm.start(*NAMES)
            await swarm.sleep(at_s)
            swarm.freeze(stopped)
            await swarm.sleep(0.8)
            swarm.thaw(stopped)
            await swarm.finished()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                assert peer.of_kind("adopted") == peer.of_kind("skipped") == []
            swarm.assert_reference()

    run(scenario())


@pytest.mark.parametrize(("first", "seed"), [("a", 0), ("b", 1), ("c", 0), ("d", 1)])
def test_who_leaves_the_start_to_another_draws_with_all_that_it_knows(
    first: str, seed: int
) -> None:
    """Only one knows how many are to come; the others would wait for more than that."""

    async def scenario() -> None:
        async with Swarm(fast(seed)) as swarm:
            for name in NAMES:
                others = [other for other in NAMES if other != name]
                await swarm.join(name, via=others, min_peers=4 if name == first else 9)
            await swarm.finished()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                assert peer.of_kind("adopted") == peer.of_kind("skipped") == []
            swarm.assert_reference()

    run(scenario())


def test_who_waits_for_more_than_there_are_does_not_wait_for_ever() -> None:
    """Two have started, with others than this peer sees: it goes along some seconds later."""

    async def scenario() -> None:
        slow = replace(FAST, steps=400, step_s=dict.fromkeys(NAMES, 0.01))
        async with Swarm(slow) as swarm:
            await swarm.start("a", "b")
            await swarm.join("c", via="a", min_peers=9)
            await swarm.until(lambda: swarm["c"].of_kind("started") != [], 4)
            await swarm.finished()
            assert {peer.versions for peer in swarm.alive} == {swarm["a"].versions}

    run(scenario())


def test_who_waits_for_others_says_for_how_many() -> None:
    async def scenario() -> None:
        async with Swarm(FAST) as swarm:
            await swarm.join("a", via=(), min_peers=3)
            await swarm.until(lambda: swarm["a"].of_kind("awaiting") != [], 3)
            await swarm.join("b", via="a", min_peers=3)
            await swarm.until(lambda: len(swarm["a"].of_kind("awaiting")) == 2, 3)
            told = swarm["a"].of_kind("awaiting")
            assert [(each["here"], each["wanted"]) for each in told] == [
                (["a"], 3),
                (["a", "b"], 3),
            ]

    run(scenario())


def test_who_freezes_before_the_start_holds_the_others_up_for_a_moment() -> None:
    async def scenario() -> None:
        async with Swarm(FAST) as swarm:
            await swarm.start(*NAMES)
            others = [swarm[name] for name in "abc"]
            knows = {"phase": "ready", "health": "alive"}
            await swarm.until(
                lambda: any(
                    knows.items() <= member.items()
                    for peer in others
                    for member in peer.members
                    if member["peer"] == "d"
                ),
                5,
            )
            swarm.freeze("d")
            await swarm.until(lambda: all(peer.trainer.step > 0 for peer in others), 8)
            swarm.thaw("d")
            await swarm.finished()
            swarm.assert_equal()

    run(scenario())
