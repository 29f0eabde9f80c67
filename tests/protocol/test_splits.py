"""A reducer that gives other bytes to each peer is named, and those that it parts pass it over."""

import pytest

from tests.protocol.problem import steady
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run
from tests.support.liar import gives_other_bytes


def warned(peer: Peer, text: str) -> bool:
    return any(text in str(event["text"]) for event in peer.of_kind("warning"))


@pytest.mark.parametrize("honest", ["abcde"])
def test_a_reducer_that_parts_all_is_passed_over(honest: str) -> None:
    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*honest, "x")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            gives_other_bytes(swarm["x"].node)
            await swarm.sleep(120)
            told = [
                [e["text"] for e in swarm[name].of_kind("warning") if "false" in str(e["text"])]
                for name in honest
            ]
            assert all(text.startswith("x gave ") for texts in told for text in texts), told
            assert all(warned(swarm[name], "x gave a false mean: ") for name in honest), told
            # It may just have been let in again, have parted them, and been caught.
            peers = [swarm[name] for name in honest]
            await swarm.until(lambda: len({(p.versions, p.outer_hash) for p in peers}) == 1, 15)
            assert all(swarm[name].versions >= (18,) for name in honest)
            assert all(len(swarm[name].of_kind("adopted")) <= 5 for name in honest)

    run(scenario())


def test_of_three_it_is_named_and_causes_few_adoptions() -> None:
    """Either of the two others could lie about what it was given."""

    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*"abx")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            gives_other_bytes(swarm["x"].node)
            await swarm.sleep(200)
            for name, other in ("ab", "ba"):
                assert warned(swarm[name], f"x gave {other} another reduction of version ")
                assert len(swarm[name].of_kind("adopted")) <= 8
                assert swarm[name].versions >= (50,)

    run(scenario())
