"""Peers that go down at the worst moment, clocks that jump, bad values and bad frames: refused
where they must be, and the others finish and agree."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from murmuration.algorithms.draws import reducer_orders
from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.errors import ManifestRefused
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.identity.authority import Authority
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.transport import Unreachable
from murmuration.worker.wire import hash64
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, frame_up, once, spoiled_frame

NAMES = "abcd"
MEMBERSHIP = MembershipConfig()


@pytest.mark.parametrize(("peers", "round_"), [(2, 0), (5, 2)])
async def test_a_peer_killed_amid_its_exchange(peers, round_):
    names = "abcde"[:peers]
    victim = names[-1]
    async with Swarm(Problem(steps=15), names) as swarm:

        def kill(passing: Passing) -> bytes:
            swarm.kill(victim)
            return passing.message

        amid = frame_up(victim)
        swarm.tap = once(lambda p: amid(p) and swarm[victim].versions == (round_,), kill)
        await swarm.finished()
        assert swarm[victim].killed
        swarm.assert_equal(versions=(5,))
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            counted = [event["contributors"] for event in peer.of_kind("round")]
            assert counted[:round_] == [peers] * round_
            assert counted[round_ + 1 :] == [peers - 1] * (4 - round_)
            assert max(e["stall_s"] for e in peer.of_kind("round")) < MEMBERSHIP.detection_s(peers)


async def test_all_but_one_are_killed():
    """The last one asks for no other state, and ends the run by itself."""
    async with Swarm(Problem(steps=15), NAMES, at=1) as swarm:
        for name in "bcd":
            swarm.kill(name)
        await swarm.finished(60)
        assert (swarm["a"].versions, swarm["a"].of_kind("adopted")) == ((5,), [])
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 1


@pytest.mark.parametrize(
    ("answered", "shard", "last_round"), [(0, 0, False), (2, 1, False), (0, 1, True), (2, 0, True)]
)
async def test_a_reducer_killed_after_it_has_answered_one_contributor(answered, shard, last_round):
    """Only one peer knows the reduction: the successor in the shard's order, or another one."""
    problem = Problem(steps=12 if last_round else 30)
    round_ = 3
    reducer, *others = reducer_orders(problem.manifest.run, 0, NAMES)[shard]
    lucky = others[answered]
    async with Swarm(problem, NAMES) as swarm:

        def tap(passing: Passing) -> bytes:
            down = not passing.up and passing.target == reducer
            if down and passing.body in ("header", "frame"):
                if swarm[reducer].versions >= (round_,) and passing.source != lucky:
                    swarm.network.cut(reducer, passing.source)
                    raise Unreachable("the answer is lost")
                if swarm[reducer].versions >= (round_,) and passing.body == "frame":
                    swarm.kill(reducer)
            return passing.message

        swarm.tap = tap
        await swarm.finished()
        assert swarm[reducer].killed
        assert len(swarm.alive) == 3
        swarm.assert_equal()
        # Who applied the other reduction of the shard loses that round at most.
        assert swarm.alive[0].versions[0] >= problem.steps // 3 - 1
        assert not any(peer.train.error for peer in swarm.alive)


HOUR_S = 3600


class WallClock:
    """Time as the system tells it, moved by `ahead_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0
        seconds, nanoseconds = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: seconds() + self.ahead_s)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + self.ahead_s * 10**9)


@pytest.mark.parametrize(
    ("jumps_s", "encrypted"),
    [((HOUR_S, -HOUR_S), False), ((-25 * HOUR_S, 0), True), ((0, -25 * HOUR_S), True)],
)
async def test_a_jump_of_the_wall_clock_has_no_effect(jumps_s, encrypted, monkeypatch, tmp_path):
    """In the middle of rounds, twice; a peer joins in between, and one is killed and comes back,
    each with a start by the clock of then."""
    clock = WallClock(monkeypatch)
    authority = Authority.make(tmp_path) if encrypted else None
    async with Swarm(steady(60), authority=authority) as swarm:
        swarm.starts_by_clock = True
        await swarm.start(*"abc")
        await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
        await swarm.sleep(0.2)
        clock.ahead_s = jumps_s[0]
        await swarm.join("d", via="a")
        await swarm.until(lambda: swarm["a"].versions >= (5,), 60)
        await swarm.sleep(0.2)
        clock.ahead_s = jumps_s[1]
        swarm.kill("c")
        await swarm.sleep(8)
        await swarm.restart("c", via="a")
        await swarm.ends_equal(versions=(12,))
        for name in "abd":
            assert swarm[name].of_kind("round_failed") == []
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 4


def changed(message: bytes, change: Callable[[pb.ExchangeDown], object]) -> bytes:
    down = pb.ExchangeDown.FromString(message)
    change(down)
    return down.SerializeToString()


def damaged(down: pb.ExchangeDown) -> None:
    down.frame.payload = bytes([down.frame.payload[0] ^ 1]) + down.frame.payload[1:]


def altered(down: pb.ExchangeDown, **header: int) -> None:
    down.header.MergeFrom(pb.ReductionHeader(**header))


@pytest.mark.parametrize(
    ("up", "body", "change"),
    [
        (True, "frame", spoiled_frame),
        (False, "frame", partial(changed, change=damaged)),
        (False, "header", partial(changed, change=partial(altered, total_bytes=4))),
        (False, "header", partial(changed, change=partial(altered, codec=2))),
    ],
    ids=["contribution", "reduction", "another size", "another codec"],
)
async def test_what_is_damaged_on_the_way_is_sent_again_within_the_round(up, body, change):
    """The network did it, not the peer: nobody's contribution is missed for that."""
    async with Swarm(Problem(steps=6), NAMES) as swarm:
        swarm.tap = once(lambda p: p.up == up and p.body == body, lambda p: change(p.message))
        await swarm.ends_at_reference()
        refused = [e["reason"] for peer in swarm.alive for e in peer.of_kind("refused")]
        assert [sum(peer.refused.values()) for peer in swarm.alive].count(1) == len(refused) == up
        assert all("damaged" in str(reason) for reason in refused)


async def test_a_damaged_state_is_not_adopted():
    async with Swarm(Problem(steps=36), "abc") as swarm:
        await swarm.until(lambda: swarm["a"].versions >= (2,), 10)
        frames = []

        def tap(passing: Passing) -> bytes:
            if passing.method != "Data/Fetch" or passing.up or len(frames) > 3:
                return passing.message
            reply = pb.FetchReply.FromString(passing.message)
            if reply.HasField("frame"):  # the frame is whole, the state is not
                frames.append(passing)
                reply.frame.payload = b"\0\0\0\0" + reply.frame.payload[4:]
                reply.frame.hash = hash64(reply.frame.payload)
            return reply.SerializeToString()

        swarm.tap = tap
        await swarm.join("d", via="a")
        await swarm.ends_equal(versions=(12,))
        assert any("fragment 0 is damaged" in text for text in swarm["d"].warnings)


async def test_a_peer_whose_parameters_are_not_finite_goes_on_from_the_anchor():
    """It contributes no movement, all states stay finite, and no round is slowed down."""
    async with Swarm(Problem(steps=30), NAMES) as swarm:
        swarm["d"].replica.poison_at = 4
        await swarm.ends_equal()
        for peer in swarm.alive:
            for state in peer.trainer.states:
                assert torch.isfinite(state.anchor).all()
                assert torch.isfinite(state.momentum).all()
        (lost,) = swarm["d"].of_kind("put_back")
        assert lost["steps_lost"] >= 1
        assert swarm["d"].of_kind("round_failed") == []
        assert swarm["a"].versions == (10,)
        waits = [event["stall_s"] for event in swarm["a"].of_kind("round")]
        assert max(waits) < RoundConfig().grace_s


async def test_a_hostile_contribution_changes_nobodys_state():
    """NaN with the right sizes and hashes: what the others apply is the mean of the others."""
    poison = np.full(100, np.nan, "<f4").tobytes()  # a shard of three peers

    def tap(passing: Passing) -> bytes:
        if not (passing.up and passing.source == "c" and passing.body in ("header", "frame")):
            return passing.message
        up = pb.ExchangeUp.FromString(passing.message)
        if passing.body == "header":
            up.header.hash, up.header.resumed = hash64(poison), False
        else:
            up.frame.CopyFrom(pb.Frame(offset=0, payload=poison, hash=hash64(poison)))
        return up.SerializeToString()

    async with Swarm(Problem(steps=3), "abc") as swarm:
        swarm.tap = tap
        await swarm.until(lambda: swarm["a"].versions == swarm["b"].versions == (1,), 120)
        assert swarm["a"].outer_hash == swarm["b"].outer_hash
        assert torch.isfinite(swarm["a"].trainer.states[0].anchor).all()
        assert swarm["a"].refused["invalid"] >= 1
        assert swarm["b"].refused["invalid"] >= 1
        assert swarm["c"].of_kind("round_failed")


async def test_a_peer_of_another_run_is_refused_with_the_first_difference():
    problem = Problem(steps=30)
    async with Swarm(problem, "ab") as swarm:
        other = replace(problem, plan=Plan(inner_steps=4))
        await swarm.join("x", via="a", problem=other)
        await swarm.until(lambda: swarm["x"].train.ended, 30)
        error = swarm["x"].train.error
        assert isinstance(error, ManifestRefused)
        assert "diloco.inner_steps: 4 in the joiner's, 3 in this run's" in str(error)
        swarm["x"].killed = True  # it has ended by itself
        await swarm.ends_equal(versions=(10,))
        assert {member["peer"] for member in swarm["a"].members} == {"a", "b"}


async def test_a_second_peer_of_one_name_is_refused_while_the_first_answers():
    """The first would be thrown out of the swarm, and never know."""
    async with Swarm(steady(25), "ab") as swarm:
        await swarm.until(lambda: swarm["b"].versions >= (1,), 30)
        first = swarm.peers.pop("b")
        second = await swarm.join("b", via="a", address="elsewhere")
        await swarm.until(lambda: second.train.ended, 30)
        assert isinstance(second.train.error, ManifestRefused)
        assert "'b' lives at b; choose another name" in str(second.train.error)
        swarm.peers["b"] = first
        await swarm.ends_equal(versions=(5,))
