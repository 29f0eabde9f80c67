"""Who joins is dialled back before it is a member: nobody waits for a peer that none can reach."""

import pytest

from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from worker.errors import NotDialled

NOWHERE = "nowhere:7700"


@pytest.mark.parametrize("at_s", [2.6, 5.0])
def test_a_joiner_with_a_wrong_address_is_refused_and_slows_nobody(at_s: float) -> None:
    async def undisturbed() -> float:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"abc")
            await swarm.finished()
            return swarm.loop.time()

    async def scenario() -> float:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"abc")
            await swarm.sleep(at_s)
            stranger = await swarm.join("d", via="a", min_peers=2, advertise=NOWHERE)
            with pytest.raises(NotDialled, match=r"--advertise HOST:PORT") as refused:
                await swarm.until(lambda: stranger.done, 10)
            assert f"a does not reach d at {NOWHERE}, which it advertises" in str(refused.value)
            swarm.peers.pop("d")
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            for peer in swarm.alive:
                assert [m["peer"] for m in peer.members] == ["a", "b", "c"]
                assert {event["contributors"] for event in peer.of_kind("round")} == {3}
            return swarm.loop.time()

    assert run(scenario()) == pytest.approx(run(undisturbed()), abs=0.5)


def test_a_second_peer_dials_back_too() -> None:
    """The one that is asked may be the only one that reaches the newcomer."""

    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start(*"ab")
            await swarm.sleep(2)
            swarm.network.cut("b", "d")
            stranger = await swarm.join("d", via="a", min_peers=2)
            with pytest.raises(NotDialled, match="b does not reach d at d"):
                await swarm.until(lambda: stranger.done, 10)
            swarm.peers.pop("d")
            await swarm.finished()
            swarm.assert_equal(versions=(12,))

    run(scenario())


def test_a_newcomer_that_most_reach_is_taken_in_at_another_try() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=60)) as swarm:
            await swarm.start(*"abc")
            await swarm.sleep(2)
            swarm.network.cut("b", "d")
            await swarm.join("d", via="a")
            await swarm.until(lambda: swarm["d"].versions > (2,), 30)
            assert swarm["d"].of_kind("adopted")

    run(scenario())
