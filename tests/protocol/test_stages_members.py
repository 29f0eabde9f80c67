"""Members of stages that start again while an iteration is under way, that call others with
another shape or late, and what each measures of its links: each harms its own calls alone."""

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.pipeline import stage_call
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stage_call import MicrobatchDropped, StageReply
from murmuration.worker.training.mailbox import JobKind
from tests.protocol.stage_swarm import (
    BATCH,
    CONTEXT,
    HIDDEN,
    StageSwarm,
    numbers_in,
    process_of,
    three_stages,
)
from tests.support.liar import _forwards, calls_with, holds_microbatches, late_in_stages

ITERATION = 3
SLOW = three_stages(4, forward_s={"0a": 0.6})  # it holds iterations up
SLOWER = replace(SLOW, forward_s={"0a": 0.6, "2a": 0.25, "2b": 0.25})


async def started_again(swarm: StageSwarm) -> None:
    """0b is killed, and starts again in the same iteration; who asks it for losses knows that."""
    swarm.kill("0b")
    await swarm.sleep(0.1)
    await swarm.restart("0b", via=["2b"])


async def arrived(swarm: StageSwarm, microbatches: int) -> None:
    """Until 1b has done the forward of so many, of all processes of 0b."""
    jobs, forwards = swarm["1b"].replica.jobs, (JobKind.FORWARD, ITERATION)
    await swarm.until(lambda: len([j for j in jobs if j[:2] == forwards]) >= microbatches, 60)


def assert_begun_anew(swarm: StageSwarm) -> None:
    """The new process's microbatches have come back, and no others' answers with them."""
    again = swarm["0b"].replica
    assert again.iterations[ITERATION - 1].counted == {0, 1}
    for job in (JobKind.ENTER, JobKind.LOSS, JobKind.LEAVE):
        assert [again.jobs[job, ITERATION, n] for n in range(2)] == [1, 1], job
    assert swarm.total("discarded") == 0


async def test_what_an_earlier_incarnation_has_reported_stays():
    """It was further on when it was killed: the calls of both are vouched for, each by its own."""
    async with StageSwarm(SLOW, 2) as swarm:
        await swarm.reached(ITERATION)
        before = swarm["0b"]
        await swarm.until(lambda: before.trainer.step > ITERATION, 60)
        assert swarm["1b"].trainer.step == ITERATION
        await started_again(swarm)
        await swarm.ends_accounted()
        assert_begun_anew(swarm)
        assert swarm.total("dropped") == 0
        for stage in (1, 2):
            counted = swarm.counted(stage, ITERATION)
            for process in (process_of(before), process_of(swarm["0b"])):
                assert [counted[process, n] for n in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("after_s", "counted"), [(0.1, []), (1.0, [0, 1])], ids=["forward", "all counted"]
)
async def test_what_an_earlier_incarnation_had_under_way_is_dropped_once(after_s, counted):
    """Its microbatches are between the stages, or between them and it; they find the new one."""
    async with StageSwarm(SLOWER, 2) as swarm:
        await arrived(swarm, 1)
        await swarm.sleep(after_s)
        before = process_of(swarm["0b"])
        await started_again(swarm)
        await swarm.ends_accounted()
        assert_begun_anew(swarm)
        (event,) = swarm["1b"].of_kind("orphaned")
        assert (event["origin"], event["start_ms"]) == (before.peer, before.start_ms)
        assert (event["iteration"], event["counted"]) == (ITERATION, counted)
        assert sorted(numbers_in(event)) == [0, 1]
        assert swarm.total("dropped") == 2


async def test_an_origin_that_hears_of_an_earlier_incarnation_with_a_clock_ahead_goes_on():
    """In an iteration it takes a later start than that one's, as if it were another process."""
    async with StageSwarm(SLOW, 2) as swarm:
        await swarm.reached(ITERATION)
        gossip = swarm["0b"].node.gossip
        ahead = replace(gossip.me, start_ms=gossip.me.start_ms + 10_000)
        gossip.hear((ahead,))
        assert gossip.me.start_ms > ahead.start_ms
        await swarm.finished()
        for told in swarm["0b"].replica.iterations:
            assert told.counted == {0, 1} or told.iteration == ITERATION
        for stage in (1, 2):
            of_last = [p.replica.iterations[-1] for p in swarm.of_stage(stage)]
            assert sum(len(told.counted) for told in of_last) == 4


async def test_nobody_waits_for_the_earlier_process_of_a_replica():
    """Its machine has lost its power: no connection breaks, and the name is back at once."""
    async with StageSwarm(replace(SLOW, forward_s={}), 2) as swarm:
        await swarm.reached(ITERATION)
        await swarm.sleep(0.03)
        swarm.freeze("1a")
        before = swarm.peers["1a, frozen"] = swarm.peers.pop("1a")
        before.killed = True
        await swarm.join("1a", via=["0a"], address="1a'")
        await swarm.ends_accounted()
        assert swarm.total("rerouted") > 0
        assert (swarm.total("dropped"), swarm.total("discarded")) == (0, 0)


THREE = three_stages(1000, plan=PRESETS["ddp"])


@pytest.mark.parametrize("origin", [("ghost", 1), ("0a", 9), ("1b", 3), ("0b", 0)])
async def test_microbatches_that_no_present_origin_has_begun_are_not_taken(origin):
    """2b gives their gradients, which would stay in the sum, as those of an origin that is gone."""
    async with StageSwarm(THREE, {0: 2, 1: 2, 2: 2}, at=3) as swarm:
        liar, context = swarm["2b"].node.stages, swarm["1a"].node.stages.context
        of, shape = stage_call.PeerProcess(*origin), (BATCH, CONTEXT, HIDDEN)
        if of.peer == "0b":
            of = process_of(swarm["0b"])
            swarm.kill("0b")
            await swarm.until(lambda: not context.member("0b").live, 30)
        values, rest = memoryview(bytes(4 * BATCH * CONTEXT * HIDDEN)), (stage_call.Hop(2, "2b"),)
        liar.server._reply = AsyncMock(return_value=StageReply(values, ()))
        key = stage_call.StageCallKey(swarm["1a"].trainer.step + 2, of, 0)
        call = stage_call.StageCall(key, 1, rest, shape, 0, "2b")
        with pytest.raises(MicrobatchDropped, match="has begun no such"):
            await liar._forwarder._call("1a", call, values)


SHAPES = {
    "width": (BATCH, CONTEXT, HIDDEN + 8),
    "length": (BATCH, CONTEXT + 1, HIDDEN),
    "batches": (BATCH + 1, CONTEXT, HIDDEN),
}


@pytest.mark.parametrize(
    ("liar", "name", "known"),
    [
        ("1a", "width", True),
        ("1a", "batches", True),
        ("2b", "length", False),
        ("1a", "width", False),
    ],
)
async def test_calls_of_another_shape_end_alone(liar, name, known):
    """Where the task does not say its shape, torch does so as it computes."""
    async with StageSwarm(THREE, {0: 1, 1: 2, 2: 2}) as swarm:
        for peer in swarm.alive if not known else ():
            assert peer.node.stages is not None
            peer.node.stages.context.activation_shape = None
        await swarm.reached(3)
        swarm.links_mbps[liar] = 0.5  # it is refused while it still sends
        calls_with(swarm[liar].node, SHAPES[name])
        await swarm.reached(12, limit_s=120)
        assert all(peer.train.error is None for peer in swarm.alive)
        told = [text for p in swarm.alive for text in p.warnings if "has failed" in text]
        assert bool(told) == ((name, known) in (("batches", True), ("width", False)))
        assert all(text.startswith(f"a stage call of {liar} has failed: ") for text in told)
        reasons = {event["reason"] for event in swarm[liar].of_kind("rerouted")}
        assert not known or all("activations of" in str(each) for each in reasons), reasons
        swarm.assert_counted_once()


@pytest.mark.parametrize("path", [(), ("nobody",), ("x" * 3_000_000,)])
async def test_a_false_path_costs_a_few_iterations_of_a_stage_and_names_no_other(path):
    async def call(honest: Any, *args: Any) -> StageReply:
        return replace(await honest(*args), path=path)

    async with StageSwarm(three_stages(100), {0: 2, 1: 2, 2: 1}, at=3) as swarm:
        _forwards(swarm["1b"].node, call)
        await swarm.reached(40, limit_s=200)
        assert sum(told.discarded for told in swarm["2a"].replica.iterations) <= 8
        told = [text for peer in swarm.alive if peer.name != "1b" for text in peer.warnings]
        assert all("1b" in text for text in told), told
        assert swarm.total("lost") == 0  # nobody is reported to that serves no stage


REPLIES: dict[str, Any] = {
    "takes none": lambda _: asyncio.Event().wait(),
    "loses": AsyncMock(side_effect=MicrobatchDropped("lost")),
}


@pytest.mark.parametrize("holder", ["0a", "1a takes none", "2a", "1a loses", "2a loses"])
async def test_whoever_holds_microbatches_is_named_and_passed_over(holder):
    """One that never ends an iteration too; one that takes none is named only the second time. What
    one says is lost another does, and an origin names it after 10 s."""
    liar, _, how = holder.partition(" ")
    async with StageSwarm(THREE, {0: 2, 1: 2, 2: 2}, at=3) as swarm:
        node = swarm[liar].node
        if how:
            node.stages.server._reached = REPLIES[how]
        else:
            holds_microbatches(node)
        others = [peer for peer in swarm.alive if peer.name != liar]
        iteration = 80 if how == "loses" else 15
        await swarm.until(lambda: min(peer.trainer.step for peer in others) >= iteration, 100)
        told = [text for peer in others for text in peer.warnings]
        assert bool(told) == (holder not in ("1a takes none", "2a loses"))
        assert all(text.startswith(f"{liar} ") for text in told), told
        assert how != "loses" or not swarm.total("dropped")


@pytest.mark.parametrize(("late", "late_s"), [("0a", 3.0), ("2a", 1.0)])
async def test_whoever_is_late_with_microbatches_is_named(late, late_s):
    """A replica is passed over, and an origin is not waited for."""
    async with StageSwarm(three_stages(1000), 2, at=8) as swarm:
        late_in_stages(swarm[late].node, late_s)
        others = [peer for peer in swarm.alive if peer.name != late]
        await swarm.until(lambda: any(peer.warnings for peer in others), 30)
        before = min(peer.trainer.step for peer in others)
        await swarm.sleep(2.5)  # 12 iterations
        assert min(peer.trainer.step for peer in others) >= before + 10
        told = [text for peer in others for text in peer.warnings]
        assert all(text.startswith(f"{late} ") for text in told), told


FORWARD_S = {f"{stage}{letter}": 1.0 for stage in range(3) for letter in "ab"}
PROBLEM = three_stages(10_000, forward_s=FORWARD_S)


def told(swarm: StageSwarm, name: str) -> dict[str, Profile]:
    """The measurements of others that a peer has heard of, and its own."""
    members = swarm[name].node.gossip.members
    return {member.peer: Profile.unpack(member.profile) for member in members if member.live}


def all_links_are_told(swarm: StageSwarm) -> bool:
    """Says if everyone has heard latency and rate of every link, inside a stage too."""
    names = {peer.name for peer in swarm.alive}
    return all(
        names - {name} <= profile.rate_bytes_per_s.keys() & profile.latency_s.keys()
        for peer in swarm.alive
        for name, profile in told(swarm, peer.name).items()
    )


async def test_all_links_are_measured_when_they_are_there_and_a_newcomers_by_the_others():
    async with StageSwarm(PROBLEM) as swarm:
        swarm.network.cut("1a", "1b")
        await swarm.start("0a", "1a", "1b", "2a")
        await swarm.sleep(15.0)
        assert not swarm["1a"].node.stages.context.measurements.measured_at("1b")
        assert swarm["1a"].node.stages.context.measurements.measured_at("2a")
        swarm.network.heal("1a", "1b")
        await swarm.until(lambda: all_links_are_told(swarm), 40.0)
        await swarm.join("2b", ["0a"])
        await swarm.until(lambda: len(told(swarm, "0a")) == 5 and all_links_are_told(swarm), 30.0)


async def test_peers_come_to_agree_on_the_figures_that_they_plan_with():
    async with StageSwarm(PROBLEM, {0: 1, 1: 2, 2: 1}) as swarm:
        await swarm.until(lambda: all_links_are_told(swarm), 20.0)
        await swarm.sleep(40.0)  # until real traffic outweighs probes
        settled = swarm.total("other_snapshots")
        await swarm.sleep(15.0)
        assert swarm.total("other_snapshots") == settled
