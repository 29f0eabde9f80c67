"""A failure on the virtual clock comes again: a scenario takes the same course every time."""

from tests.protocol.pair_runs import steady
from tests.protocol.swarm import Event, Swarm
from tests.protocol.virtual_time import run


def test_the_same_scenario_takes_the_same_course() -> None:
    async def scenario() -> tuple[float, list[list[Event]]]:
        async with Swarm(steady(40)) as swarm:
            await swarm.start(*"abcde")
            await swarm.sleep(4)
            swarm.cut("a", "b")
            swarm.kill("c")
            await swarm.restart("c", via=["d"])
            await swarm.finished()
            return swarm.loop.now, [peer.events for peer in swarm.peers.values()]

    assert run(scenario()) == run(scenario())
