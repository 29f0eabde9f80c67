"""A member whose contributions are far too large moves the others no further than the limit."""

from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.round_context import RoundConfig
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing
from tests.protocol.virtual_time import run
from tests.support.liar import Lie, lies_at_the_end

FAR = Problem(steps=6, far={"d": 40.0})


KEEP = Plan(inner_steps=3, codec="sign", reduction_codec="sign", merge="keep")


@pytest.mark.parametrize("plan", [FAR.plan, KEEP], ids=["reset", "keep"])
def test_a_norm_above_the_limit_counts_as_the_reference_says(plan: Plan) -> None:
    async def scenario() -> None:
        async with Swarm(replace(FAR, plan=plan)) as swarm:
            await swarm.start(*"abcd")
            await swarm.finished()
            swarm.assert_reference()
            told = swarm["d"].warnings
            rest = "is kept for later rounds" if plan.keeps else "is lost"
            assert any("of what this peer contributed" in str(t) and rest in str(t) for t in told)

    run(scenario())


FOUR_BITS = replace(KEEP, codec="e3m0", reduction_codec="e3m0")
EXACT = replace(KEEP, codec="fp32", reduction_codec="fp32")


@pytest.mark.parametrize(
    ("plan", "most"), [(KEEP, 0.3), (FOUR_BITS, 0.05), (EXACT, 0.0)], ids=["sign", "e3m0", "fp32"]
)
@pytest.mark.parametrize("lie", [torch.neg, lambda values: values + 1e4], ids=["turned", "1e4"])
def test_the_last_mean_moves_the_model_no_further_than_a_round(
    plan: Plan, most: float, lie: Lie
) -> None:
    """It is of what all have learned since their one anchor, and not of whole models."""

    async def anchor_of(lie: Lie | None) -> torch.Tensor:
        async with Swarm(Problem(steps=18, plan=replace(plan, consensus=True))) as swarm:
            await swarm.start(*"abcd")
            if lie is not None:
                lies_at_the_end(swarm["d"].node, lie)
            await swarm.finished()
            swarm.assert_equal()
            return swarm["a"].trainer.states[0].anchor

    honest, moved = run(anchor_of(None)), run(anchor_of(lie))
    assert (moved - honest).norm() <= most * honest.norm()


def test_a_replica_keeps_what_the_norm_limit_has_not_counted() -> None:
    """With exact codecs and one round, the anchor and the local parameters hold all of it."""

    async def scenario() -> None:
        problem = replace(FAR, far={"d": 6.0}, steps=3, plan=Plan(inner_steps=3, merge="keep"))
        learned = Synthetic(problem, "d")
        start = learned.parameters["layers.0.w"].clone()
        for step in range(3):
            learned.inner_step(step, learned.backward(step))
        g = start - learned.parameters["layers.0.w"]
        async with Swarm(problem) as swarm:
            await swarm.start(*"abcd")
            await swarm.finished()
            anchor = swarm["d"].trainer.states[0].anchor
            kept = anchor - swarm["d"].trainer.replica.parameters["layers.0.w"]
            share = torch.linalg.vector_norm(kept) / torch.linalg.vector_norm(g)
            assert torch.allclose(kept, share * g, atol=1e-5)
            assert 0.1 < share < 0.5

    run(scenario())


def test_a_trimmed_mean_stays_with_the_honest() -> None:
    async def anchor_of(rounds: RoundConfig) -> torch.Tensor:
        problem = replace(FAR, steps=3, rounds=rounds)
        async with Swarm(problem) as swarm:
            await swarm.start(*"abcde")
            await swarm.finished()
            swarm.assert_equal()
            return swarm["a"].trainer.states[0].anchor

    async def scenario() -> None:
        """`d` pulls each value further than the honest do: with a trimmed mean by no more."""
        honest = replace(FAR, steps=3, far={}).reference("abce")["a"][0].anchor
        start = Synthetic(FAR, "a").parameters["layers.0.w"]
        trimmed = await anchor_of(RoundConfig(norm_limit=0.0, aggregation="trimmed"))
        taken = await anchor_of(RoundConfig(norm_limit=0.0))
        assert torch.dist(trimmed, honest) < torch.dist(start, honest) < torch.dist(taken, honest)

    run(scenario())


def test_a_peer_that_is_too_large_again_and_again_is_left_out_and_the_others_say_so() -> None:
    problem = replace(FAR, steps=60)

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start(*"abcd")
            await swarm.finished()
            swarm.assert_equal()
            told = [text for name in "abc" for text in swarm[name].warnings]
            assert told
            own = swarm["d"].warnings
            assert sum("of what this peer contributed" in text for text in own) == 1
            assert all(str(text).startswith("d is in quarantine") for text in told)
            quarantine = swarm["a"].node.status()["quarantine"]
            assert isinstance(quarantine, dict)
            assert quarantine["d"] > 0
            honest = replace(problem, far={}).reference("abc")["a"][0].anchor
            with_d = swarm["a"].trainer.states[0].anchor
            assert torch.dist(with_d, honest) < torch.linalg.vector_norm(honest)

    run(scenario())


def test_a_peer_that_announces_less_than_it_sends_is_refused() -> None:
    def tap(passing: Passing) -> bytes:
        if not (passing.up and passing.source == "d" and passing.body == "header"):
            return passing.message
        up = pb.ExchangeUp.FromString(passing.message)
        up.header.norm /= 20
        return up.SerializeToString()

    async def scenario() -> None:
        async with Swarm(replace(FAR, steps=3)) as swarm:
            swarm.tap = tap
            await swarm.start(*"abcd")
            await swarm.until(lambda: all(swarm[name].versions == (1,) for name in "abc"), 200)
            reasons = [str(e["reason"]) for e in swarm["a"].of_kind("refused")]
            assert any("announced were" in reason for reason in reasons)

    run(scenario())
