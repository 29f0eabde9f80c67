"""A reducer that gives other bytes to each peer is named, and those that it parts pass it over."""

from tests.protocol.problem import steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.liar import gives_other_bytes


def test_a_reducer_that_parts_all_is_passed_over() -> None:
    honest = "abcde"

    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*honest, "x")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            gives_other_bytes(swarm["x"].node)
            await swarm.sleep(60)
            told = [[w for w in swarm[name].warnings if "false" in w] for name in honest]
            assert all(text.startswith("x gave ") for texts in told for text in texts), told
            assert all(swarm[name].warned("x gave a false mean: ") for name in honest), told
            # It may just have been let in again, have parted them, and been caught.
            await swarm.until(lambda: swarm.agrees(*honest), 15)
            assert all(swarm[name].versions >= (10,) for name in honest)
            assert all(len(swarm[name].of_kind("adopted")) <= 5 for name in honest)

    run(scenario())


def test_of_three_it_is_named_and_causes_few_adoptions() -> None:
    """Either of the two others could lie about what it was given."""

    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*"abx")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            gives_other_bytes(swarm["x"].node)
            await swarm.sleep(100)
            for name, other in ("ab", "ba"):
                assert swarm[name].warned(f"x gave {other} another reduction of version ")
                assert len(swarm[name].of_kind("adopted")) <= 8
                assert swarm[name].versions >= (25,)

    run(scenario())
