"""Bad values, bad frames and the wrong run in a whole swarm: refused, and the others go on."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.errors import ManifestRefused
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.wire import hash64
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, spoiled_frame
from tests.protocol.virtual_time import run

NAMES = "abcd"


def first(what: Callable[[Passing], bool], change: Callable[[bytes], bytes]) -> Callable:
    """A tap that changes the first message for which `what` holds."""
    done = False

    def tap(passing: Passing) -> bytes:
        nonlocal done
        if done or not what(passing):
            return passing.message
        done = True
        return change(passing.message)

    return tap


def damaged_reduction(message: bytes) -> bytes:
    down = pb.ExchangeDown.FromString(message)
    down.frame.payload = bytes([down.frame.payload[0] ^ 1]) + down.frame.payload[1:]
    return down.SerializeToString()


def test_a_damaged_contribution_is_refused_and_the_swarm_ends_equal() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            swarm.tap = first(lambda p: p.up and p.body == "frame", spoiled_frame)
            await swarm.start(*NAMES)
            await swarm.finished()
            swarm.assert_equal(versions=(5,))
            assert [sum(peer.refused.values()) for peer in swarm.alive].count(1) == 1
            reasons = [e["reason"] for peer in swarm.alive for e in peer.of_kind("refused")]
            assert len(reasons) == 1
            assert "damaged" in str(reasons[0])

    run(scenario())


def test_a_damaged_contribution_is_sent_again_within_the_round() -> None:
    """The network did it, not the peer: nobody's contribution is missed for that."""

    async def scenario() -> None:
        async with Swarm(Problem(steps=6)) as swarm:
            swarm.tap = first(lambda p: p.up and p.body == "frame", spoiled_frame)
            await swarm.start(*NAMES)
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())


def test_a_damaged_reduction_is_fetched_again_within_the_round() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=6)) as swarm:
            swarm.tap = first(lambda p: not p.up and p.body == "frame", damaged_reduction)
            await swarm.start(*NAMES)
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())


def test_a_reduction_of_another_codec_or_size_is_not_applied() -> None:
    def resized(message: bytes) -> bytes:
        down = pb.ExchangeDown.FromString(message)
        down.header.total_bytes += 4
        return down.SerializeToString()

    def recoded(message: bytes) -> bytes:
        down = pb.ExchangeDown.FromString(message)
        down.header.codec = 2
        return down.SerializeToString()

    async def scenario(change: Callable[[bytes], bytes]) -> None:
        async with Swarm(Problem(steps=6)) as swarm:
            swarm.tap = first(lambda p: not p.up and p.body == "header", change)
            await swarm.start(*NAMES)
            await swarm.finished()
            swarm.assert_reference()

    run(scenario(resized))
    run(scenario(recoded))


def test_a_damaged_state_is_not_adopted() -> None:
    def damaged(message: bytes) -> bytes:
        reply = pb.FetchReply.FromString(message)
        if reply.WhichOneof("body") == "frame":
            reply.frame.payload = b"\0\0\0\0" + reply.frame.payload[4:]
            reply.frame.hash = hash64(reply.frame.payload)  # the frame is whole, the state is not
        return reply.SerializeToString()

    async def scenario() -> None:
        async with Swarm(Problem(steps=60)) as swarm:
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 10)
            frames = []

            def tap(passing: Passing) -> bytes:
                if passing.method != "Data/Fetch" or passing.up or len(frames) > 3:
                    return passing.message
                if pb.FetchReply.FromString(passing.message).WhichOneof("body") == "frame":
                    frames.append(passing)
                return damaged(passing.message)

            swarm.tap = tap
            await swarm.join("d", via="a")
            await swarm.finished()
            swarm.assert_equal(versions=(20,))
            warnings = swarm["d"].warnings
            assert any("fragment 0 is damaged" in text for text in warnings)

    run(scenario())


def test_a_peer_whose_parameters_are_not_finite_goes_on_from_the_anchor() -> None:
    """It contributes no movement, all states stay finite, and no round is slowed down."""

    async def scenario() -> None:
        async with Swarm(Problem(steps=60)) as swarm:
            await swarm.start(*NAMES)
            swarm["d"].replica.poison_at = 4
            await swarm.finished()
            swarm.assert_equal()
            for peer in swarm.alive:
                for state in peer.trainer.states:
                    assert torch.isfinite(state.anchor).all()
                    assert torch.isfinite(state.momentum).all()
            (lost,) = swarm["d"].of_kind("put_back")
            assert lost["steps_lost"] >= 1
            assert swarm["d"].of_kind("round_failed") == []
            assert swarm["a"].versions == (20,)
            waits = [event["stall_s"] for event in swarm["a"].of_kind("round")]
            assert max(waits) < RoundConfig().grace_s

    run(scenario())


def test_a_hostile_contribution_changes_nobodys_state() -> None:
    """NaN with the right sizes and hashes: what the others apply is the mean of the others."""
    poison = np.full(100, np.nan, "<f4").tobytes()  # a shard of three peers

    def tap(passing: Passing) -> bytes:
        if not (passing.up and passing.source == "c" and passing.body in ("header", "frame")):
            return passing.message
        up = pb.ExchangeUp.FromString(passing.message)
        if passing.body == "header":
            up.header.hash = hash64(poison)
            up.header.resumed = False
        else:
            up.frame.CopyFrom(pb.Frame(offset=0, payload=poison, hash=hash64(poison)))
        return up.SerializeToString()

    async def scenario() -> None:
        async with Swarm(Problem(steps=3)) as swarm:
            swarm.tap = tap
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions == swarm["b"].versions == (1,), 120)
            assert swarm["a"].outer_hash == swarm["b"].outer_hash
            assert torch.isfinite(swarm["a"].trainer.states[0].anchor).all()
            assert swarm["a"].refused["invalid"] >= 1
            assert swarm["b"].refused["invalid"] >= 1
            assert swarm["c"].of_kind("round_failed")

    run(scenario())


def test_a_peer_of_another_run_is_refused_with_the_first_difference() -> None:
    async def scenario() -> None:
        problem = Problem(steps=30)
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b")
            other = replace(problem, plan=Plan(inner_steps=4))
            await swarm.join("x", via="a", problem=other)
            await swarm.until(lambda: swarm["x"].train.ended, 30)
            error = swarm["x"].train.error
            assert isinstance(error, ManifestRefused)
            assert "diloco.inner_steps: 4 here, 3 there" in str(error)
            swarm["x"].killed = True  # it has ended by itself
            await swarm.finished()
            swarm.assert_equal(versions=(10,))
            assert {member["peer"] for member in swarm["a"].members} == {"a", "b"}

    run(scenario())


def test_a_second_peer_of_one_name_is_refused_while_the_first_answers() -> None:
    """The first would be thrown out of the swarm, and never know."""

    async def scenario() -> None:
        async with Swarm(steady(25)) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: swarm["b"].versions >= (1,), 30)
            first = swarm.peers.pop("b")
            second = await swarm.join("b", via="a", address="elsewhere")
            await swarm.until(lambda: second.train.ended, 30)
            assert isinstance(second.train.error, ManifestRefused)
            assert "'b' lives at b; choose another name" in str(second.train.error)
            swarm.peers["b"] = first
            await swarm.finished()
            swarm.assert_equal(versions=(5,))

    run(scenario())
