"""Streams that do not begin, stop midway, or are too many: each ends alone, and is told why."""

import asyncio
import math
from dataclasses import replace

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.node.answers import FETCHES_EACH, STREAMS_EACH, most_streams
from murmuration.worker.transport import Busy, Caller, Refused
from tests.protocol.problem import steady
from tests.protocol.stage_swarm import (
    ACTIVATION_BYTES,
    BATCH,
    CONTEXT,
    HELD_BYTES,
    HIDDEN,
    StagedProblem,
    StageSwarm,
    process_of,
)
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Scripted

MALLORY = Caller("ipv4:127.0.0.1:1", "peer", "mallory")


@pytest.mark.parametrize("method", ["Data/Exchange", "Data/Fetch"])
async def test_a_stream_that_does_not_begin_is_refused(method):
    async with Swarm(steady(60), "ab", at=1) as swarm:
        with pytest.raises(Refused, match=f"{method}: no header in 10 s"):
            await swarm["a"].node.server.on_stream(method, Scripted(), MALLORY)
        await swarm.ends_equal(versions=(12,))


async def test_a_state_that_nobody_reads_is_not_held_for_ever():
    async with Swarm(steady(60), "ab", at=1) as swarm:
        asked = pb.FetchRequest(run=swarm.problem.manifest.run, fragments=[0])
        unread = Scripted(asked.SerializeToString(), reads=False)
        with pytest.raises(Refused, match="Data/Fetch: nothing was read for 120 s"):
            await swarm["a"].node.server.on_stream("Data/Fetch", unread, MALLORY)
        assert len(unread.sent) == 1


async def test_a_contribution_that_stops_midway_ends_with_a_reason():
    """When its next frame has not come for as long as a round may take."""
    async with Swarm(steady(1000), "ab", at=1) as swarm:
        node, (version,) = swarm["a"].node, swarm["a"].versions
        context = node.context
        group = ("a", "b")
        shard = next(n for n, order in enumerate(context.orders(0, group)) if order[0] == "a")
        bounds = context.shards(0, group)[shard]
        header = pb.ContributionHeader(
            run=context.run, round=version, shard=shard, sender="b",
            group=wire.group_hash(group), codec=context.codec.wire_id,
            elements=bounds.stop - bounds.start, total_bytes=bounds.contribution_bytes,
            weight=1, norm=1.0, norms=[0.5, 0.5], root=bytes(16),
        )  # fmt: skip
        begun = Scripted(pb.ExchangeUp(header=header).SerializeToString())
        await node.server.on_stream("Data/Exchange", begun, Caller("b", "peer", "b"))
        (last,) = begun.sent
        refusal, patience_s = pb.ExchangeDown.FromString(last).refusal, context.round_s(0)
        assert refusal.reason.endswith(f"from b: no frame in {patience_s:.0f} s")
        assert swarm["a"].node.clock() > patience_s


@pytest.mark.parametrize(
    ("method", "each"), [("Data/Exchange", STREAMS_EACH), ("Data/Fetch", FETCHES_EACH)]
)
async def test_one_caller_has_so_many_streams_and_the_others_theirs(method, each):
    """Each one that fetches keeps a state in memory, of another round."""
    async with Swarm(steady(60), "ab", at=1) as swarm:
        server = swarm["a"].node.server
        held = [
            asyncio.create_task(server.on_stream(method, Scripted(), MALLORY)) for _ in range(each)
        ]
        await swarm.sleep(1)
        for _ in range(400):
            with pytest.raises(Busy, match=f"mallory has {each} streams"):
                await server.on_stream(method, Scripted(), MALLORY)
        assert swarm["a"].refused["busy"] == 400
        assert len(swarm["a"].of_kind("warning")) < 10
        await asyncio.gather(*held, return_exceptions=True)  # they have not begun
        await swarm.ends_equal(versions=(12,))


async def test_neither_four_members_nor_those_without_a_right_hold_all_streams():
    """A member has its share; tokens and those that were expelled have none."""
    async with Swarm(steady(60), "ab", at=1) as swarm:
        server, expelled = swarm["a"].node.server, {f"expelled {n}" for n in range(4)}
        server._gate._revoked = lambda caller: caller.name in expelled
        for role, names in (("peer", expelled), ("token", set("tuvw"))):
            for name in names:
                with pytest.raises(Refused, match=r"expelled|not for the certificate"):
                    await server.on_stream("Data/Fetch", Scripted(), Caller(name, role, name))
        held = [
            asyncio.create_task(
                server.on_stream("Data/Exchange", Scripted(), Caller("m", "peer", f"m{n}"))
            )
            for n in range(4)
            for _ in range(STREAMS_EACH)
        ]
        await swarm.sleep(1)
        assert sum(not each.done() for each in held) == most_streams(2) // 2 + 4 * 8
        with pytest.raises(Refused, match="no header in"):  # and not Busy
            await server.on_stream("Data/Exchange", Scripted(), Caller("b", "peer", "b"))
        await asyncio.gather(*held, return_exceptions=True)


STAGED = StagedProblem(count=2, layers=2, microbatches=4, steps=1000, limits=6, plain=True)


def begun(
    swarm: StageSwarm, number: int = 0, shape: tuple[int, int, int] = (BATCH, CONTEXT, HIDDEN)
) -> bytes:
    """The header of a call by mallory in the iteration that is under way at 1a; of a microbatch
    for each number."""
    node = swarm["1a"].node.stages
    assert node is not None
    header = pb.StageCallHeader(
        run=node.context.run,
        iteration=node.tracker.iteration,
        origin="0a",
        start_ms=process_of(swarm["0a"]).start_ms,
        microbatch=number % STAGED.microbatches,
        sender="mallory",
        stage=1,
        codec=node.context.codec.wire_id,
        shape=shape,
        total_bytes=4 * math.prod(shape),
    )
    return pb.StageCallUp(header=header).SerializeToString()


async def answer_of(swarm: StageSwarm, stream: Scripted) -> str:
    """The end of the call: why it is refused."""
    await swarm["1a"].node.server.on_stream("Data/StageCall", stream, MALLORY)
    return pb.StageCallDown.FromString(stream.sent[-1]).failed.reason


async def test_microbatches_that_do_not_come_leave_memory_to_others():
    async with StageSwarm(STAGED, 1, at=3) as swarm:
        node, silent = swarm["1a"].node, [Scripted(begun(swarm, number)) for number in range(20)]
        held = [
            asyncio.create_task(node.server.on_stream("Data/StageCall", each, MALLORY))
            for each in silent
        ]
        await swarm.sleep(1)
        half = STAGED.limits // 2 * HELD_BYTES  # it is one of two callers
        assert half <= node.stages.context.budget.held_bytes
        await swarm.reached(swarm["0a"].trainer.step + 8, limit_s=20)
        assert swarm.total("dropped") == swarm.total("skipped") == 0
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)


@pytest.mark.parametrize(
    "shape", [(2, CONTEXT, HIDDEN), (1024, 2048, HIDDEN)], ids=["two batches", "128 MiB"]
)
async def test_a_microbatch_above_a_batch_is_refused_at_once(shape):
    """It takes no memory, whatever there is."""
    async with StageSwarm(replace(STAGED, limits=1_000_000_000), 1, at=3) as swarm:
        before = swarm["1a"].node.clock()
        reason = await answer_of(swarm, Scripted(begun(swarm, shape=shape)))
        batch = (BATCH, CONTEXT, HIDDEN)
        assert reason == f"activations of shape {shape}; a batch of this run: {batch}"
        assert swarm["1a"].node.clock() == before
        (warning,) = swarm["1a"].of_kind("warning")
        assert warning["text"] == f"a stage call of mallory has failed: {reason}"


class Dripping(Scripted):
    """Sends a frame of one byte every 100 s."""

    at = 0

    async def receive(self) -> bytes | None:
        if self._messages:
            return self._messages.pop(0)
        await asyncio.sleep(100)
        frame = pb.Frame(offset=self.at, payload=b"x", hash=wire.hash64(b"x"))
        self.at += 1
        return pb.StageCallUp(frame=frame).SerializeToString()


async def test_a_microbatch_in_small_frames_has_no_longer_than_in_one():
    async with StageSwarm(replace(STAGED, forward_s={"0a": 2, "1a": 2}), 1, at=1) as swarm:
        before = swarm["1a"].node.clock()
        reason = await answer_of(swarm, Dripping(begun(swarm)))
        assert reason == (
            f"1 of {ACTIVATION_BYTES} bytes of activations came in time: each MiB has 120 s"
        )
        assert swarm["1a"].node.clock() == pytest.approx(before + 120)
