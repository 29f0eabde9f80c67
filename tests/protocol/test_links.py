"""Links that are cut and healed, alone or as a partition: nothing counts twice, all agree again."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from murmuration.algorithms.draws import reducer_orders
from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.wire import payloads
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, once

NAMES = "abcd"

# A shard of three peers is over 1 MiB, so that it crosses in two frames.
TWO_FRAMES = Problem(layers=(1_200_000,), steps=3)
SHARD_BYTES = 4 * 400_000


@pytest.fixture
def _one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard a peer, however large."""
    monkeypatch.setattr("murmuration.algorithms.plan._MAX_CHUNKS_PER_PEER", 1)


@pytest.mark.usefixtures("_one_chunk")
@pytest.mark.parametrize("up", [True, False])
async def test_what_a_cut_link_breaks_off_resumes_and_counts_once(up):
    """The first frame of a contribution has arrived, or of a reduction has come back."""
    async with Swarm(TWO_FRAMES, "abc") as swarm:

        def cut(passing: Passing) -> bytes:
            swarm.loop.call_later(0.005 * up, swarm.network.cut, "a", "b")
            swarm.loop.call_later(0.6, swarm.network.heal, "a", "b")
            return passing.message

        def frame(p: Passing) -> bool:
            found = (p.up, p.source, p.target, p.body) == (up, "a", "b", "frame")
            return found and p.exchanged.frame.offset >= up

        swarm.tap = once(frame, cut)
        await swarm.ends_at_reference()
        assert {swarm[name].payload_received_bytes for name in "ab"} == {4 * SHARD_BYTES}
        assert swarm["a"].payload_sent_bytes == 5 * SHARD_BYTES - 1024 * 1024
        assert swarm["c"].payload_sent_bytes == 4 * SHARD_BYTES


@pytest.mark.parametrize("frame", [1, 6, 12])
@pytest.mark.parametrize(("peers", "cut_s"), [(2, 3.0), (4, 0.2)])
async def test_short_cuts_at_any_time_change_nothing(peers, cut_s, frame):
    """Shorter than it takes to declare a peer dead: nobody's contribution is missed."""
    names, seen = NAMES[:peers], 0
    async with Swarm(Problem(steps=6), names) as swarm:

        def tap(passing: Passing) -> bytes:
            nonlocal seen
            seen += 1
            if seen == frame:
                swarm.network.cut(names[0], names[1])
                swarm.loop.call_later(cut_s, swarm.network.heal, names[0], names[1])
            return passing.message

        swarm.tap = tap
        await swarm.ends_at_reference()
        assert seen >= frame


async def test_rounds_over_all_go_on_though_two_do_not_reach_each_other():
    """Their shards are reduced by those whom everybody reaches, as soon as the cut is known."""
    async with Swarm(steady(40), NAMES) as swarm:
        await swarm.until(lambda: swarm["a"].versions[0] >= 2, 30)
        swarm.network.cut("a", "b")
        await swarm.ends_at_reference()
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            assert [event["contributors"] for event in peer.of_kind("round")] == 8 * [4]


async def test_a_link_that_comes_and_goes_stops_no_round(monkeypatch):
    """A round takes longer than the link is whole: what has begun elsewhere stays there, and the
    link is held for cut until it has been whole for a while."""
    problem = replace(TWO_FRAMES, layers=(4_800,), steps=15, plan=Plan(inner_steps=5))

    monkeypatch.setattr(payloads, "MAX_FRAME_BYTES", 1024)
    async with Swarm(replace(problem, step_s=dict.fromkeys(NAMES, 0.5)), NAMES) as swarm:
        swarm.lags_s.update({frozenset(link): 1.0 for link in combinations(NAMES, 2)})
        await swarm.until(lambda: swarm["a"].versions >= (1,), 60)

        async def flap() -> None:
            while True:
                swarm.cut("a", "b")
                await swarm.sleep(3.5)
                swarm.heal("a", "b")
                await swarm.sleep(1.5)

        flapping = swarm.loop.create_task(flap())
        await swarm.finished()
        flapping.cancel()
        swarm.assert_reference()
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            assert [event["contributors"] for event in peer.of_kind("round")] == [4, 4, 4]
            assert len(peer.of_kind("unreachable")) == (peer.name in "ab")


async def test_a_partition_heals_into_one_swarm():
    async with Swarm(steady(72), NAMES, at=2) as swarm:
        await swarm.sleep(0.31)
        swarm.cut("ab", "cd")
        await swarm.sleep(22)
        ours, theirs = swarm["a"], swarm["c"]
        assert min(*ours.versions, *theirs.versions) > 6  # both sides went on
        assert ours.outer_hash != theirs.outer_hash
        swarm.heal("ab", "cd")
        await swarm.until(swarm.agrees, 30)
        await swarm.ends_equal()
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 4
        told = {name: swarm[name].of_kind("adopted") for name in NAMES}
        given_up = {n: [e for e in events if e["rounds_given_up"]] for n, events in told.items()}
        losers = {name for name, events in given_up.items() if events}
        assert losers in ({"a", "b"}, {"c", "d"})  # one side's rounds, and it says so
        for name in losers:
            assert sum(e["rounds_given_up"] for e in given_up[name]) > 6 - 2
            assert all(e["apart"] > 0 for e in given_up[name])


@pytest.mark.parametrize("after_s", [0.0, 1.6])
@pytest.mark.parametrize("merge", ["reset", "keep"])
async def test_a_peer_that_was_cut_off_goes_back_to_what_the_others_share(merge, after_s):
    """It is faster, so that it is rounds ahead of the two others, who keep theirs."""
    problem = Problem(
        steps=200,
        plan=Plan(inner_steps=5, merge=merge),
        membership=MembershipConfig(reconnect_s=1.0),
        step_s={"c": 0.07},
    )
    async with Swarm(problem, "abc", at=2) as swarm:
        swarm.cut("ab", "c")
        await swarm.until(lambda: swarm["a"].versions >= (20,), 60)
        await swarm.sleep(after_s)
        assert swarm["c"].versions > swarm["a"].versions
        swarm.heal("ab", "c")
        await swarm.until(swarm.agrees, 30)
        assert swarm["a"].versions <= (26,)
        await swarm.ends_equal()
        back = swarm["c"].of_kind("adopted")[0]
        assert back["rounds_given_up"] > 20
        # What it had learned in the first four of these counts all the same.
        assert back["kept_steps"] == (20 if merge == "reset" else 0)
        assert back["confirmed_by"] == ["b"]
        for name in "ab":
            peer = swarm[name]
            assert [e["rounds_given_up"] for e in peer.of_kind("adopted")] in ([], [0])
            assert len(peer.of_kind("round_failed")) <= 2
            assert peer.of_kind("round")[-1]["contributors"] == 3


async def test_what_a_failed_round_has_counted_is_not_counted_again():
    """`a` cannot reach one reducer until its round has failed; the others count its other shards.
    Nor do the other two reach each other: else the shards would go to those that all reach.

    All movement of the swarm is a's, before its first round: with outer learning rate 1 and no
    momentum, the anchor must move by a's share of the mean once, whichever round counts it."""
    problem = Problem(
        layers=(400,),
        steps=400,
        plan=Plan(inner_steps=2, outer_lr=1.0, outer_momentum=0.0),
        rounds=RoundConfig(grace_s=2.0, slack_s=3.0),
        step_s=dict.fromkeys("abcd", 0.5),
    )
    async with Swarm(problem, NAMES) as swarm:
        start = {}
        for peer in swarm.alive:
            peer.replica.moves_until = 2 if peer.name == "a" else 0
            start[peer.name] = peer.trainer.states[0].anchor.clone()
        reducer = reducer_orders(problem.manifest.run, 0, NAMES)[1][0]
        far = reducer if reducer != "a" else "b"
        one, other = set(NAMES) - {"a", far}
        swarm.network.cut("a", far)
        swarm.network.cut(one, other)
        await swarm.until(lambda: bool(swarm["a"].of_kind("round_failed")), 120)
        moved = start["a"] - torch.cat(list(swarm["a"].replica.parameters.values()))
        swarm.network.heal("a", far)
        swarm.network.heal(one, other)
        await swarm.until(lambda: swarm["a"].versions >= (3,), 120)
        await swarm.until(swarm.agrees, 60)
        ended = start["a"] - swarm["b"].trainer.states[0].anchor
        # A shard was closed by all four, or by the three that reach its reducer.
        shares = {round(share, 2) for share in (ended / moved).tolist()}
        assert shares <= {0.25, 0.33}
