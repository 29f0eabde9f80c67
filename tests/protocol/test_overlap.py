"""Rounds on their way while training goes on: peers may differ in how long, and who waits for
whom is told."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.round_context import RoundConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run

H = 6
FOUR_BITS = Plan(inner_steps=H, fragments=3, merge_alpha=0.5, codec="e3m0", reduction_codec="int8")
LAYERS = (300, 200, 150)
STEP_S = 0.2


def problem(tau: int, **changes: object) -> Problem:
    plan = replace(FOUR_BITS, overlap_steps=tau)
    return replace(Problem(layers=LAYERS, steps=4 * H, plan=plan), **changes)


def stalls(peer: Peer) -> list[float]:
    """The stalls before the closing round of each fragment, which is always waited for."""
    last = dict(enumerate(version - 1 for version in peer.versions))
    rounds = [e for e in peer.of_kind("round") if e["round"] != last[int(str(e["fragment"]))]]
    return [float(str(e["stall_s"])) for e in rounds]


async def test_peers_of_different_overlap_and_speed_end_with_equal_anchors():
    shared = problem(0, step_s={"a": 0.05, "b": 0.3, "c": 0.1})
    async with Swarm(shared) as swarm:
        for name, tau in {"a": 0, "b": 2, "c": H}.items():
            own = replace(shared, plan=replace(shared.plan, overlap_steps=tau))
            others = [other for other in "abc" if other != name]
            await swarm.join(name, via=others, min_peers=3, problem=own)
        await swarm.finished()
        # The offsets are 2, 4 and 6: the first two fragments close with a round of their own.
        swarm.assert_equal(versions=(5, 5, 4))
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            rounds = peer.of_kind("round")
            assert {(e["contributors"], e["missed"]) for e in rounds} == {(3, False)}
            assert peer.refused == {}


async def test_a_peer_of_another_overlap_joins_a_run_under_way():
    async with Swarm(problem(1, steps=10 * H), "ab") as swarm:
        await swarm.until(lambda: swarm["a"].versions[0] >= 3, 30)
        await swarm.join("c", via="a", problem=problem(H, steps=10 * H))
        await swarm.ends_equal(versions=(11, 11, 10))
        assert swarm["a"].of_kind("round")[-1]["contributors"] == 3


def test_with_room_in_tau_nobody_waits():
    async def scenario(tau: int) -> list[list[float]]:
        async with Swarm(problem(tau, step_s=dict.fromkeys("abc", STEP_S)), delay_s=0.05) as swarm:
            await swarm.start(*"abc")
            await swarm.ends_at_reference()
            exchanges = [e["exchange_s"] for p in swarm.alive for e in p.of_kind("round")]
            assert 0 < max(map(float, map(str, exchanges))) < 4 * STEP_S
            for peer in swarm.alive:
                assert peer.trainer.metrics.stall_s >= sum(stalls(peer))
            return [stalls(peer) for peer in swarm.alive]

    assert [set(each) for each in run(scenario(4))] == [{0.0}] * 3
    without = run(scenario(0))
    assert min(min(each) for each in without) > 0
    assert [len(each) for each in without] == [5 + 5 + 4 - 3] * 3


@pytest.mark.parametrize(
    ("exchange", "special", "left"),
    [("mean", {"merge_alpha": 0.5}, 0.05), ("pairs", {"merge_alpha": 0.5, "consensus": True}, 0.4)],
    ids=["means", "pairs"],
)
def test_a_measured_overlap_grows_until_hardly_anybody_waits(exchange, special, left):
    """Means take some seven steps, and tau is one. A pair's round also takes what one of the two
    comes later."""
    fixed = Plan(inner_steps=12, fragments=3, overlap_steps=1, exchange=exchange, **special)
    measured = replace(fixed, overlap="measured")

    async def scenario(plan: Plan) -> list[list[float]]:
        shared = Problem(layers=LAYERS, steps=8 * 12, plan=plan)
        async with Swarm(shared, "abcd", delay_s=0.15) as swarm:
            await swarm.ends_equal()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                figures = peer.trainer.metrics.plain()
                least, most = (2, 12) if plan.overlap == "measured" else (0, 0)
                assert least <= figures["most_overlap_steps"] <= most
            return [stalls(peer) for peer in swarm.alive]

    for waits, shorter in zip(run(scenario(fixed)), run(scenario(measured)), strict=True):
        half = len(waits) // 2
        assert exchange == "pairs" or sum(shorter[:half]) == 0  # from the first round on
        assert sum(waits[half:]) > 0.2 * half
        assert sum(shorter[half:]) < left * sum(waits[half:])


async def test_a_slow_peer_is_named_by_those_who_wait_for_it():
    slow = problem(1, step_s={"a": 0.1, "b": 0.1, "c": 0.5})
    async with Swarm(slow, "abc") as swarm:
        await swarm.ends_equal(versions=(5, 5, 4))
        for name in "ab":
            *rounds, closing = swarm[name].of_kind("round")
            assert {e["waited_for"] for e in rounds} == {"c"}
            # It begins when the first closing rounds are over, at all peers at once.
            assert closing["stall_s"] < 0.1
            metrics = swarm[name].trainer.metrics
            assert metrics.plain()["stall_s_by_peer"]["c"] > 0.5 * slow.steps * (0.5 - 0.1)
            assert {each["waited_for"] for each in metrics.plain()["longest_stalls"]} == {"c"}
        # The slow one is in nobody's debt: it finds the others' there already.
        assert sum(stalls(swarm["c"])) < 0.1 * sum(stalls(swarm["a"]))


async def test_a_round_that_fails_is_put_down_to_the_reducer_that_did_not_answer():
    """Everybody reaches two of the others: nobody is given up for dead, and no shard can go to a
    peer that all reach."""
    impatient = RoundConfig(grace_s=2.0, slack_s=3.0)
    cut = problem(0, steps=40 * H, step_s=dict.fromkeys("abcd", 0.5), rounds=impatient)
    async with Swarm(cut, "abcd") as swarm:
        await swarm.until(lambda: swarm["a"].versions[0] >= 1, 30)
        swarm.network.cut("a", "b")
        swarm.network.cut("c", "d")
        await swarm.until(lambda: bool(swarm["a"].of_kind("round_failed")), 60)
        assert swarm["a"].of_kind("round_failed")[0]["waiting_for"] == ["b"]
        by_peer = swarm["a"].trainer.metrics.stall_s_by_peer
        assert max(by_peer, key=by_peer.__getitem__) == "b"
