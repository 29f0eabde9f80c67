"""A member of a stage that calls others with activations of another shape, or never answers: it
harms its own calls alone, and the others go on."""

import pytest

from tests.protocol.stage_swarm import BATCH, CONTEXT, HIDDEN, StagedProblem, StageSwarm
from tests.protocol.virtual_time import run
from tests.support.liar import calls_with, holds_microbatches, late_in_stages

THREE = StagedProblem(count=3, layers=3, microbatches=2, steps=1000)
SHAPES = {
    "width": (BATCH, CONTEXT, HIDDEN + 8),
    "narrow": (BATCH, CONTEXT, 1),
    "length": (BATCH, CONTEXT + 1, HIDDEN),
    "short": (BATCH, CONTEXT - 1, HIDDEN),
    "batches": (BATCH + 1, CONTEXT, HIDDEN),
}


@pytest.mark.parametrize(
    ("liar", "name", "known"),
    [
        *(("1a", name, True) for name in SHAPES),
        *(("2b", name, False) for name in SHAPES),
        ("1a", "short", False),
        ("2b", "width", True),
    ],
)
def test_calls_of_another_shape_end_alone(liar: str, name: str, known: bool) -> None:
    """Where the task does not say its shape, torch does so as it computes."""

    async def scenario() -> None:
        async with StageSwarm(THREE) as swarm:
            await swarm.start_all({0: 1, 1: 2, 2: 2})
            for peer in swarm.alive if not known else ():
                assert peer.node.stages is not None
                peer.node.stages.context.activation_shape = None
            await swarm.reached(3)
            swarm.links_mbps[liar] = 0.5  # it is refused while it still sends
            calls_with(swarm[liar].node, SHAPES[name])
            await swarm.reached(12, limit_s=120)
            assert all(peer.train.error is None for peer in swarm.alive)
            told = [text for p in swarm.alive for text in p.warnings]
            assert not known or not any("has failed" in text for text in told)
            reasons = {event["reason"] for event in swarm[liar].of_kind("rerouted")}
            assert all("activations of" in str(each) for each in reasons), reasons
            swarm.assert_counted_once()

    run(scenario())


def test_torchs_error_names_the_caller() -> None:
    async def scenario() -> None:
        async with StageSwarm(THREE) as swarm:
            await swarm.start_all()
            for peer in swarm.alive:
                assert peer.node.stages is not None
                peer.node.stages.context.activation_shape = None
            await swarm.reached(3)
            calls_with(swarm["1a"].node, SHAPES["width"])
            await swarm.until(lambda: bool(swarm["2a"].of_kind("warning")), 20)
            (told,) = swarm["2a"].of_kind("warning")
            assert str(told["text"]).startswith("a stage call of 1a has failed: forward: ")
            await swarm.reached(swarm["2a"].trainer.step + 3, limit_s=60)

    run(scenario())


@pytest.mark.parametrize("holder", ["0a", "1a", "2a"])
def test_whoever_holds_microbatches_is_named_and_passed_over(holder: str) -> None:
    """One that begins microbatches and never ends an iteration too, and nobody else is named."""

    async def scenario() -> None:
        async with StageSwarm(THREE) as swarm:
            await swarm.start_all({0: 2, 1: 2, 2: 2})
            await swarm.reached(3)
            holds_microbatches(swarm[holder].node)
            others = [peer for peer in swarm.alive if peer.name != holder]
            await swarm.until(lambda: min(peer.trainer.step for peer in others) >= 30, 150)
            told = [text for peer in others for text in peer.warnings]
            assert told
            assert all(text.startswith(f"{holder} ") for text in told), told

    run(scenario())


@pytest.mark.parametrize("late", ["1a", "2a"])
def test_whoever_is_late_with_microbatches_is_named_and_passed_over(late: str) -> None:
    async def scenario() -> None:
        async with StageSwarm(THREE) as swarm:
            await swarm.start_all({0: 2, 1: 2, 2: 2})
            await swarm.reached(15)
            late_in_stages(swarm[late].node, 1.0)
            others = [peer for peer in swarm.alive if peer.name != late]
            await swarm.until(lambda: any(peer.warnings for peer in others), 30)
            before = min(peer.trainer.step for peer in others)
            await swarm.sleep(10)  # 50 iterations
            assert min(peer.trainer.step for peer in others) >= before + 40
            told = [text for peer in others for text in peer.warnings]
            assert all(text.startswith(f"{late} ") for text in told), told

    run(scenario())
