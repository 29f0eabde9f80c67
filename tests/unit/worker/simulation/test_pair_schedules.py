"""Random fault schedules of pair rounds in the simulator: what must hold in every one.

Two checks are also shown to fail, each on a machine that is spoiled in one place. Many more are
played by `python -m tests.lab schedules pairs`.
"""

from collections import Counter

import pytest

from murmuration.worker.exchange.pairwise.round import PairRound
from tests.support.pair_schedules import (
    EXCUSES,
    PairWorld,
    WatchedPairs,
    endings,
    left_behind,
    random_world,
    undisturbed,
    violations,
)

SCHEDULES = 16
FIRST = 326  # two generals meet in some of the schedules that follow


@pytest.mark.parametrize("shuffled", [False, True], ids=["plain", "shuffled"])
def test_nothing_is_violated_whatever_happens(shuffled):
    """And somebody is left behind in a few of them, or the faults would be too tame."""
    causes, ends, calm = Counter[str](), Counter[str](), 0
    for seed in range(FIRST, FIRST + SCHEDULES):
        world = random_world(seed, shuffled=shuffled).play()
        assert violations(world) == [], f"seed {seed}"
        causes.update(cause for _, cause in left_behind(world))
        ends.update(endings(world))
        calm += sum(1 for _ in undisturbed(world))
    assert causes.keys() <= EXCUSES
    assert causes
    assert min(ends["applied"], ends["failed"], ends["alone"], calm) > SCHEDULES / 5


def test_without_faults_everything_is_applied():
    for seed in range(8):
        world = PairWorld(random_world(seed).swarm.scenario, ()).play()
        assert violations(world) == []
        assert all(part.applied for part in world.attendances), f"seed {seed}"


class Spoiled(WatchedPairs):
    """Its rounds have other rules."""

    round_kind: type[PairRound]

    def step(self, round_: PairRound) -> None:
        if type(round_) is PairRound:
            round_.__class__ = self.round_kind
        super().step(round_)


class Hasty(PairRound):
    """Applies as soon as it holds everything, without a word of the others."""

    def decide(self, now: float) -> list[str]:
        calls = super().decide(now)
        self.succeeded |= self.complete
        return calls


class Impatient(PairRound):
    """Gives up as soon as it is prepared and is ticked."""

    def _hopeless(self, now: float) -> str:
        soon = self.complete and now > self.patience_until - 8.0
        return "this takes too long" if soon else super()._hopeless(now)

    def due_at(self, now: float) -> float:
        return min(super().due_at(now), now + 0.02)


@pytest.mark.parametrize(
    ("check", "kind", "seed"), [("unprepared", Hasty, 0), ("torn", Impatient, 32)]
)
def test_a_spoiled_machine_is_caught(check, kind, seed):
    """By the first schedule that shows it."""
    found = violations(random_world(seed, type("", (Spoiled,), {"round_kind": kind})).play())
    assert any(text.startswith(check) for text in found), found
