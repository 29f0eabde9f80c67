"""Peers that come late, or were away: they adopt the swarm's state, and end equal."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.errors import PeersUnreachable
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

NAMES = "abcd"


@pytest.mark.parametrize("seed", [0, 3])
def test_a_frozen_peer_is_fenced_and_catches_up(seed: int) -> None:
    """As SIGSTOP for a minute, at another moment of its round for each seed."""

    async def scenario() -> None:
        async with Swarm(steady(150, seed)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await swarm.sleep(0.41 * seed)
            swarm.freeze("d")
            stood = swarm["d"].versions
            await swarm.sleep(60)
            assert swarm["d"].versions == stood
            assert swarm["a"].versions[0] > stood[0] + 15
            swarm.thaw("d")
            await swarm.until(swarm.agrees, 10)
            await swarm.finished()
            swarm.assert_equal(versions=(30,))
            assert swarm["d"].of_kind("adopted")
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 4
            for peer in (swarm["a"], swarm["b"], swarm["c"]):
                assert peer.of_kind("round_failed") == []
                assert peer.of_kind("adopted") == []

    run(scenario())


@pytest.mark.parametrize("frozen_s", [0.5, 2.0])
def test_a_short_freeze_costs_nothing_but_time(frozen_s: float) -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (1,), 10)
            swarm.freeze("d")
            await swarm.sleep(frozen_s)
            swarm.thaw("d")
            await swarm.finished()
            swarm.assert_equal(versions=(5,))
            swarm.assert_reference()

    run(scenario())


# --------------------------------------------------------------------------------------- joiners


@pytest.mark.parametrize("at_s", [2.6, 4.96, 5.04])
def test_a_late_joiner_adopts_and_ends_equal(at_s: float) -> None:
    async def scenario() -> None:
        async with Swarm(steady(30)) as swarm:
            await swarm.start(*"abc")
            await swarm.sleep(at_s)
            await swarm.join("d", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(6,))
            first = swarm["d"].of_kind("adopted")[0]
            assert first["reason"] == "joining"
            assert swarm["d"].trainer.metrics.inner_steps < 30
            assert swarm["d"].of_kind("round_failed") == []
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 4

    run(scenario())


def test_a_round_that_is_laid_out_without_a_joiner_is_the_others() -> None:
    """It has computed before they have, but they have not agreed on it."""

    async def scenario() -> None:
        async with Swarm(replace(steady(30), step_s={"d": 0.001})) as swarm:
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions >= (3,), 10)
            await swarm.join("d", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(6,))
            assert swarm["d"].of_kind("round_failed") == []
            contributors = {e["round"]: e["contributors"] for e in swarm["a"].of_kind("round")}
            entered = swarm["d"].of_kind("round")
            assert [e["missed"] for e in entered[:2]] == [True, False]
            assert [contributors[e["round"]] for e in entered[:2]] == [3, 4]

    run(scenario())


@pytest.mark.parametrize(("seed", "at_s"), [(0, 0.3), (1, 1.3), (0, 2.2)])
def test_a_peer_joins_before_the_first_round_has_closed(seed: int, at_s: float) -> None:
    """Everyone is at version 0, but laid out over other groups; `b` is slow, so the round waits."""
    problem = Problem(steps=30, plan=Plan(inner_steps=10), step_s={"b": 0.3}, seed=seed)

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b")
            await swarm.sleep(at_s)
            await swarm.join("c", via="b")
            await swarm.finished(60)
            swarm.assert_equal(versions=(3,))
            for peer in swarm.alive:
                assert all(event["stall_s"] < 10 for event in peer.of_kind("round"))
            (adopted,) = swarm["c"].of_kind("adopted")
            assert adopted["reason"] == "joining"
            # All hold the same first values: nobody sends them.
            fetched = swarm["c"].transport.traffic.received["Data/Fetch"]
            assert fetched < problem.encoded_bytes / 4

    run(scenario())


def test_a_peer_that_is_started_anew_adopts_and_ends_equal() -> None:
    """Same name, another address and epoch: its former life is forgotten."""

    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            swarm.kill("c")
            await swarm.sleep(8)
            await swarm.restart("c", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 3

    run(scenario())


@pytest.mark.parametrize(("others", "frozen_s"), [("ab", 60), ("ab", 150), ("a", 60)])
def test_a_joiner_that_sleeps_before_its_first_round_has_nothing_to_lose(
    others: str, frozen_s: float
) -> None:
    """Its own rounds have counted nobody, so it follows the others however far they have gone."""

    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*others)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            joiner = await swarm.join("c", via=others)
            await swarm.until(lambda: joiner.of_kind("adopted") != [], 30)
            swarm.freeze("c")
            await swarm.sleep(frozen_s)
            swarm.thaw("c")
            await swarm.until(swarm.agrees, 5)
            assert joiner.warnings == swarm["a"].warnings == []
            assert swarm["a"].of_kind("adopted") == []

    run(scenario())


def test_a_peer_that_joins_a_finished_swarm_takes_its_state() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=6)) as swarm:
            await swarm.start(*"ab")
            await swarm.until(lambda: swarm["a"].trainer.step >= 6, 10)
            await swarm.join("c", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(2,))

    run(scenario())


def test_too_few_peers_is_an_error_that_says_so() -> None:
    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.join("a", via=["nowhere"], min_peers=2)
            await swarm.finished(120)

    with pytest.raises(PeersUnreachable, match="1 of 2 peers after 60 s"):
        run(scenario())
