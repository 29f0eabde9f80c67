"""Samples are leased in blocks: all of an epoch once, and at most a block again for a crash."""

import asyncio

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.leases import SampleStream
from tests.protocol.drawn import Churn, Counts, DrawingSwarm
from tests.protocol.problem import Problem, steady
from tests.protocol.virtual_time import run


async def test_peers_that_stay_draw_every_sample_once():
    problem = Problem(steps=130, plan=Plan(inner_steps=10))
    stream = SampleStream(id=1, block=20, length=990)
    async with DrawingSwarm(problem, stream, "abcd") as swarm:
        await swarm.ends_equal(versions=(13,))
        for epoch in range(2):
            assert swarm.counted(epoch) == Counts(never=0, once=990, again=0)
        assert all(len(drawn) > 500 for drawn in swarm.samples.values())


@pytest.mark.parametrize(
    "churn",
    [
        Churn(114, SampleStream(id=1, block=20, length=2400), delay_s=0.23),
        Churn(65, SampleStream(id=1, block=5, length=4003), batch=12),
        Churn(3, SampleStream(id=1, block=7, length=2603), batch=3, delay_s=0.06),
    ],
    ids=[
        "a kill as a batch is given, on slow links",
        "batches over blocks, a kill that is known when the others are in the next epoch",
        "a leave before the kills are known",
    ],
)
def test_joins_leaves_and_kills_repeat_a_block_for_each_kill(churn):
    counts = run(churn.run())
    assert counts.never == 0
    assert counts.once > churn.stream.length - 100
    assert counts.again <= churn.most_again


async def test_a_peer_that_leaves_hands_on_the_rest_of_its_block():
    stream = SampleStream(id=1, block=40, length=600)
    async with DrawingSwarm(steady(200), stream, "abc") as swarm:
        await swarm.until(lambda: len(swarm.samples["b"]) == 48, 60)  # the second, not its end
        await swarm.leave("b")
        await swarm.until(lambda: all(swarm.is_past(peer.name) for peer in swarm.alive), 200)
        assert swarm.counted(0) == Counts(never=0, once=600, again=0)


async def test_a_peer_that_was_held_for_dead_gives_up_the_blocks_that_others_took():
    """As SIGSTOP for a quarter of a minute: it counts as a crash."""
    stream = SampleStream(id=1, block=16, length=800)
    async with DrawingSwarm(steady(300), stream, "abcd") as swarm:
        await swarm.until(lambda: len(swarm.samples["d"]) >= 40, 60)
        swarm.freeze("d")
        await swarm.sleep(15)
        swarm.thaw("d")
        await swarm.until(lambda: all(swarm.is_past(peer.name) for peer in swarm.alive), 400)
        counts = swarm.counted(0)
        assert counts.never == 0
        assert counts.again <= 2 * stream.block


async def test_a_member_that_answers_no_lease_is_passed_over():
    """It lives, contributes, and announces its own blocks, which changes nothing."""
    stream = SampleStream(id=1, block=8, length=100_000)
    async with DrawingSwarm(steady(10_000), stream, "abcd") as swarm:
        await swarm.until(lambda: len(swarm.samples["a"]) >= 40, 60)
        swarm["d"].node.server.calls["Control/Lease"] = never
        await swarm.sleep(10)
        before = [len(swarm.samples[name]) for name in "abc"]
        await swarm.sleep(6)
        drawn = [len(swarm.samples[name]) - was for name, was in zip("abc", before, strict=True)]
        assert min(drawn) >= 0.9 * 4 * 6 / 0.5  # four for each step of half a second
        for name in "abc":
            told = swarm[name].warnings
            assert sum(text.startswith("d answers no lease") for text in told) == 1


async def never(request: bytes) -> bytes:
    """Answers nothing."""
    await asyncio.Event().wait()
    return b""
