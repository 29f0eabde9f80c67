"""Pairs that have slept go on where the others are, whatever is on its way to them then."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.algorithms.schedule import Due
from murmuration.worker.training.mailbox import SkipAhead
from tests.protocol import swarm as swarms
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run

NOLOCO = replace(PRESETS["noloco"], inner_steps=5, consensus=False)
STREAMING = replace(
    PRESETS["streaming-noloco"], inner_steps=6, fragments=2, overlap_steps=3, consensus=False
)


@pytest.mark.parametrize("plan", [NOLOCO, STREAMING], ids=["noloco", "streaming-noloco"])
def test_a_round_that_is_skipped_as_soon_as_it_has_begun_is_over(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word comes amid the step after which both begin it: too late to be heeded before."""
    monkeypatch.setattr(swarms, "SETTLE_S", 5.0)
    problem = Problem((300, 200), plan=plan, steps=60, step_s=dict.fromkeys("ab", 0.5))
    schedule = plan.schedule(fragments=plan.fragments, steps=60)
    begins, goes_on = (schedule.send_step(Due(0, round_)) for round_ in (2, 7))

    def rounds(peer: Peer, kind: str) -> list[object]:
        return [event["round"] for event in peer.of_kind(kind) if event["fragment"] == 0]

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: {peer.trainer.step for peer in swarm.alive} == {begins}, 30)
            for peer in swarm.alive:
                peer.train.answer(SkipAhead(goes_on))
            await swarm.finished()
            for peer in swarm.alive:
                assert rounds(peer, "round_failed") == [2]
                assert rounds(peer, "round") == [0, 1, *range(8, schedule.rounds(0))]
                assert {event["contributors"] for event in peer.of_kind("round")} == {2}

    run(scenario())
