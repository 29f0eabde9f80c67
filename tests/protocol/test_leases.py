"""Samples are leased in blocks: all of an epoch once, and at most a block again for a crash."""

import asyncio

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker import wire
from murmuration.worker.leases import SampleStream
from murmuration.worker.leases.ledger import EPOCH_BLOCKS, Block, Holding, LeaseNews
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


FALSE_WORDS = {
    "more is used of blocks than they have": [({}, {Block(1, n): 10**9 for n in range(20, 125)})],
    "all epochs are used that can be told": [({1: ((0, 2**63),)},)],
    "ranges without end": [
        ({1: tuple((at + n, at + n + 1) for n in range(0, 14_000, 2))},)
        for at in range(EPOCH_BLOCKS, 9 * EPOCH_BLOCKS, EPOCH_BLOCKS)
    ],
    "streams without end": [(dict.fromkeys(range(2, 1026), ((5, 6),)),)],
    "a block beyond all numbers": [()],
}


@pytest.mark.parametrize("what", FALSE_WORDS)
async def test_what_a_member_says_falsely_of_samples_stops_nobody(what):
    stream = SampleStream(id=1, block=8, length=1000)
    async with DrawingSwarm(steady(10_000), stream, "abcd") as swarm:
        await swarm.until(lambda: len(swarm.samples["a"]) >= 8, 60)
        node = swarm["d"].node
        for at, used in enumerate(FALSE_WORDS[what]):
            held = () if used else (Block(1, 2**64 - 1),)
            said = LeaseNews((Holding("d", node.gossip.me.start_ms, 10**6 + at, held),), *used)
            raw = wire.lease_news_to_message(said, node.gossip.run).SerializeToString()
            for name, to in ((name, node.gossip.address_of(name)) for name in "abc"):
                await node.transport.call(to, "Control/Lease", raw, 3.0, name)
        await swarm.sleep(6)
        before = [len(swarm.samples[name]) for name in "abc"]
        await swarm.sleep(30)
        drawn = [swarm.samples[name][was:] for name, was in zip("abc", before, strict=True)]
        assert min(map(len, drawn)) >= 0.9 * 4 * 30 / 0.5
        assert len({sample for each in drawn for sample in each}) == sum(map(len, drawn))


async def never(request: bytes) -> bytes:
    """Answers nothing."""
    await asyncio.Event().wait()
    return b""
