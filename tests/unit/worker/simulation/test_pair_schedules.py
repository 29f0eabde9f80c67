"""Random fault schedules of pair rounds in the simulator: what must hold in every one.

Each check is also shown to fail, on a machine that is spoiled in one place. Many more schedules are
played by `python -m tests.lab schedules pairs`.
"""

from collections import Counter

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.pairwise.partner import PartnerStream
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
def test_nothing_is_violated_whatever_happens(shuffled: bool) -> None:
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


def test_without_faults_everything_is_applied() -> None:
    for seed in range(8):
        world = PairWorld(random_world(seed).swarm.scenario, ()).play()
        assert violations(world) == []
        assert all(part.applied for part in world.attendances), f"seed {seed}"


# ------------------------------------------------------------- the checks find what is wrong


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


class Deaf(PairRound):
    """Never hears that a partner holds everything, but knows its limit."""

    def decide(self, now: float) -> list[str]:
        for partner in self.partners.values():
            partner.staged = False
        return super().decide(now)


class Stubborn(PairRound):
    """Its clock is slow where it counts."""

    def _hopeless(self, now: float) -> str:
        return super()._hopeless(now - 3.0)

    def due_at(self, now: float) -> float:
        return min(super().due_at(now), now + 0.5)


class Sleepy(PairRound):
    """Forgets time."""

    def _hopeless(self, now: float) -> str:
        return ""


class Impatient(PairRound):
    """Gives up as soon as it has staged and is ticked."""

    def _hopeless(self, now: float) -> str:
        soon = self.complete and now > self.patience_until - 8.0
        return "this takes too long" if soon else super()._hopeless(now)

    def due_at(self, now: float) -> float:
        return min(super().due_at(now), now + 0.02)


class Careless(WatchedPairs):
    """Lets a partner in whatever its round, and never forgets one."""

    def _decide(self, caller: PartnerStream, header: pb.PairHeader) -> None:
        for held in self._laid.values():
            if caller.peer in held.group and held.round != header.round:
                del self._waiting[caller]
                caller.round, held.streams[caller.peer] = held, caller
                caller.hold(header)
                return
        super()._decide(caller, header)


def spoiled(kind: type[PairRound]) -> type[WatchedPairs]:
    return type("Spoiled", (Spoiled,), {"round_kind": kind})


@pytest.mark.parametrize(
    ("check", "kind", "seed"),
    [
        ("unstaged", spoiled(Hasty), 0),
        ("overdue", spoiled(Stubborn), 35),
        ("delayed", spoiled(Deaf), 0),
        ("unfinished", spoiled(Sleepy), 1),
        ("torn", spoiled(Impatient), 32),
        ("mixed", Careless, 0),
    ],
)
def test_a_spoiled_machine_is_caught(check: str, kind: type[WatchedPairs], seed: int) -> None:
    """By the first schedule that shows it."""
    found = violations(random_world(seed, kind).play())
    assert any(text.startswith(check) for text in found), found
