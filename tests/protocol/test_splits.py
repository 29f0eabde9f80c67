"""A reducer that gives other bytes to each peer is named, and those that it parts pass it over."""

from collections.abc import Callable
from itertools import count

import pytest

from murmuration.worker import wire
from murmuration.worker.transport import Stream
from tests.protocol.problem import steady
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run


def give_other_bytes(peer: Peer, by: Callable[[int], float]) -> None:
    """From now on each answer of this reducer is another mean. Args: by: how much, each time."""
    (reducer,) = peer.node._reducers
    context, give, times = peer.node.context, reducer._give, count()

    async def other(reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        codec, raw = context.reduction_codec, reduction.payload.raw
        values = wire.decode(codec, raw, len(raw) // 4) + by(next(times))
        payload = wire.Payload.of(wire.encode(codec, values))
        header = reduction.header.__class__(**{**vars(reduction.header), "hash": payload.hash})
        await give(wire.Reduction(header, payload), offset, stream)

    reducer._give = other  # type: ignore[method-assign]


def warned(peer: Peer, text: str) -> bool:
    return any(text in str(event["text"]) for event in peer.of_kind("warning"))


@pytest.mark.parametrize("honest", ["abc", "abcde"])
def test_a_reducer_that_parts_all_is_passed_over(honest: str) -> None:
    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*honest, "x")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            give_other_bytes(swarm["x"], lambda times: 1e-3 * times)
            await swarm.sleep(120)
            told = [
                [e["text"] for e in swarm[name].of_kind("warning") if "false" in str(e["text"])]
                for name in honest
            ]
            assert all(text.startswith("x gave ") for texts in told for text in texts), told
            assert all(warned(swarm[name], "x gave a false mean: ") for name in honest), told
            assert len({(swarm[name].versions, swarm[name].outer_hash) for name in honest}) == 1
            assert all(swarm[name].versions >= (18,) for name in honest)
            assert all(len(swarm[name].of_kind("adopted")) <= 5 for name in honest)

    run(scenario())


def test_of_three_it_is_named_and_causes_few_adoptions() -> None:
    """Either of the two others could lie about what it was given."""

    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start(*"abx")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            give_other_bytes(swarm["x"], lambda times: 1e-3 * times)
            await swarm.sleep(200)
            for name, other in ("ab", "ba"):
                assert warned(swarm[name], f"x gave {other} another reduction of version ")
                assert len(swarm[name].of_kind("adopted")) <= 8
                assert swarm[name].versions >= (50,)

    run(scenario())
