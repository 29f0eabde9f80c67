"""Peers that go down at the worst moment: the others finish, and agree."""

import pytest

from murmuration.algorithms.reducers import reducer_orders
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.transport import Unreachable
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, frame_up, once
from tests.protocol.virtual_time import run

NAMES = "abcd"
MEMBERSHIP = MembershipConfig()


@pytest.mark.parametrize("peers", [2, 5])
@pytest.mark.parametrize("round_", [0, 2])
def test_a_peer_killed_amid_its_exchange(peers: int, round_: int) -> None:
    names = "abcde"[:peers]
    victim = names[-1]

    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:

            def kill(passing: Passing) -> bytes:
                swarm.kill(victim)
                return passing.message

            amid = frame_up(victim)
            swarm.tap = once(lambda p: amid(p) and swarm[victim].versions == (round_,), kill)
            await swarm.start(*names)
            await swarm.finished()
            assert swarm[victim].killed
            swarm.assert_equal(versions=(5,))
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                counted = [event["contributors"] for event in peer.of_kind("round")]
                assert counted[:round_] == [peers] * round_
                assert counted[round_ + 1 :] == [peers - 1] * (4 - round_)
                assert max(e["stall_s"] for e in peer.of_kind("round")) < MEMBERSHIP.detection_s(
                    peers
                )

    run(scenario())


def test_all_but_one_are_killed() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (1,), 10)
            for name in "bcd":
                swarm.kill(name)
            await swarm.finished(60)
            assert swarm["a"].versions == (5,)
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 1

    run(scenario())


def test_peers_are_killed_one_after_another() -> None:
    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"abcde")
            for name, version in (("e", 1), ("d", 4), ("c", 7)):
                await swarm.until(lambda v=version: swarm["a"].versions >= (v,), 60)
                swarm.kill(name)
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 2

    run(scenario())


@pytest.mark.parametrize("answered", [0, 2])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("last_round", [False, True], ids=["midway", "at the end"])
def test_a_reducer_killed_after_it_has_answered_one_contributor(
    answered: int, shard: int, last_round: bool
) -> None:
    """Only one peer knows the reduction: the successor in the shard's order, or another one."""
    problem = Problem(steps=12 if last_round else 30)
    round_ = 3
    reducer, *others = reducer_orders(problem.manifest.run, 0, NAMES)[shard]
    lucky = others[answered]

    async def scenario() -> None:
        async with Swarm(problem) as swarm:

            def tap(passing: Passing) -> bytes:
                down = not passing.up and passing.target == reducer
                if down and passing.body in ("header", "frame"):
                    if swarm[reducer].versions >= (round_,) and passing.source != lucky:
                        swarm.network.cut(reducer, passing.source)
                        raise Unreachable("the answer is lost")
                    if swarm[reducer].versions >= (round_,) and passing.body == "frame":
                        swarm.kill(reducer)
                return passing.message

            swarm.tap = tap
            await swarm.start(*NAMES)
            await swarm.finished()
            assert swarm[reducer].killed
            assert len(swarm.alive) == 3
            swarm.assert_equal()
            # Who applied the other reduction of the shard loses that round at most.
            assert swarm.alive[0].versions[0] >= problem.steps // 3 - 1
            assert not any(peer.train.error for peer in swarm.alive)

    run(scenario())
