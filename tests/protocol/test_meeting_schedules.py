"""Random schedules of rounds in pairs and small groups: what must hold in every one.

Each check is also shown to fail: on a machine that is spoiled in one place, or on a swarm that lets
any stream in. `tests/bench/pair_schedules.py` plays many more schedules.
"""

from collections.abc import Iterable, Iterator

import pytest

from tests.protocol.meeting_checks import EXCUSES, LeftBehind, left_behind, violations
from tests.protocol.meeting_parts import (
    JITTER_S,
    ROUND_S,
    Attendance,
    Faults,
    SimPeer,
    Stream,
    Touch,
)
from tests.protocol.meeting_schedules import MeetingWorld, random_world
from worker.exchange.pairwise.round import Action, Event, PairRound, Stage, Succeeded

SCHEDULES = 1500
SPOILED_SCHEDULES = 300


def test_nothing_is_violated_whatever_happens() -> None:
    """And somebody is left behind in a few of them, or the faults would be too tame."""
    left: list[LeftBehind] = []
    for seed in range(SCHEDULES):
        world = random_world(seed)
        world.play()
        assert violations(world) == [], f"seed {seed}"
        left += left_behind(world)
    assert {each.cause for each in left} == EXCUSES


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(late=2),
        Faults(joiners=1),
        Faults(breaks=0.3),
    ],
    ids=["undisturbed", "late", "joiners", "breaks"],
)
def test_mild_faults_leave_nobody_behind(faults: Faults) -> None:
    for seed in range(60):
        world = MeetingWorld(2 + seed % 8, 2 + seed % 3, seed, faults)
        world.play()
        assert violations(world) == []
        assert left_behind(world) == []
        if faults == Faults():
            assert all(part.succeeded for part in world.attendances), f"seed {seed}"


def test_broken_streams_leave_behind_only_who_could_not_know() -> None:
    """Streams that break again and again until the patience is over: the two generals."""
    left, parts = [], 0
    for seed in range(60):
        world = MeetingWorld(2 + seed % 8, 2 + seed % 3, seed, Faults(breaks=0.6))
        world.play()
        assert violations(world) == []
        left += left_behind(world)
        parts += len(world.attendances)
    assert {each.cause for each in left} == {"broken"}
    assert len(left) < 0.01 * parts


def test_a_seed_is_a_schedule() -> None:
    def ends(seed: int) -> list[tuple[str, int, float | None, str]]:
        world = random_world(seed)
        world.play()
        return [(p.peer, p.round, p.ended_at, p.failed) for p in world.attendances]

    for seed in (5, 6, 7):
        assert ends(seed) == ends(seed)
    assert ends(5) != ends(13)


# ------------------------------------------------------------------------------- two generals


class LastWordLost(MeetingWorld):
    """In round 1 of a pair the link is cut as soon as one has heard the other's word and applies.

    Its own word is still on the way then, and is lost.
    """

    cut_s = 2 * ROUND_S

    def _apply(self, peer: SimPeer, part: Attendance) -> None:
        if part.round == 1 and not self.cut_until:
            link, end = frozenset(part.group), self.now + self.cut_s
            self.touches.append(Touch("cut", link, self.now, end))
            self._cut(link, end)
        super()._apply(peer, part)


class LastWordLate(LastWordLost):
    """The same, and the link is whole again while the other still waits."""

    cut_s = 1.0


def pairs_of(kind: type[LastWordLost]) -> list[tuple[LastWordLost, Attendance, Attendance]]:
    """Schedules with the two parts of round 1: who applied at the cut, and who missed its word."""
    found = []
    for seed in range(40):
        world = kind(2, 2, seed, Faults())
        if world.interval_s > ROUND_S:  # the cut is over before the last rounds
            world.play()
            parts = [part for part in world.attendances if part.round == 1]
            happy, other = sorted(parts, key=lambda part: part.ended_at or 0.0)
            found.append((world, happy, other))
    assert {happy.peer for _, happy, _ in found} == {"a", "b"}, "each of them in some schedule"
    return found


def test_two_generals_one_applies_and_the_other_misses_its_word_and_gives_up() -> None:
    """The case that no protocol between two can settle.

    Both hold everything and have said so. One has heard the other and applies; its own word is
    lost, and the link stays cut. The other cannot know whether it was heard, and gives up at its
    limit. Nothing else is harmed: their next rounds succeed, one of them a version behind.
    """
    for world, happy, other in pairs_of(LastWordLost):
        assert happy.succeeded
        assert other.staged_at is not None
        assert "the stream broke" in other.failed
        assert other.waiting_for == (happy.peer,)
        assert left_behind(world) == [LeftBehind(other.peer, happy.peer, 1, "broken")]
        assert violations(world) == []
        assert world.peers[happy.peer].version == world.peers[other.peer].version + 1


def test_a_lost_word_is_said_again_when_the_link_is_back_before_the_limit() -> None:
    """Whichever of the two called first."""
    for world, happy, other in pairs_of(LastWordLate):
        assert happy.succeeded
        assert other.succeeded, f"{happy.peer} has applied and does not say it again"
        assert left_behind(world) == []
        assert violations(world) == []


# ------------------------------------------------------------- the checks find what is wrong


class Again(PairRound):
    """Forgets that it has applied."""

    def step(self, event: Event, now: float) -> list[Action]:
        actions = super().step(event, now)
        if Succeeded() in actions:
            self._ended = False
        return actions


class Hasty(PairRound):
    """Applies as soon as it holds everything, without a word of the others."""

    def step(self, event: Event, now: float) -> list[Action]:
        actions = super().step(event, now)
        if Stage() in actions and Succeeded() not in actions:
            self._ended = True
            actions.append(Succeeded())
        return actions


class Hurried(PairRound):
    """Content with the values of one partner."""

    def step(self, event: Event, now: float) -> list[Action]:
        if any(partner.received for partner in self._partners.values()) and not self._ended:
            self._ended = True
            return [Stage(), Succeeded()]
        return super().step(event, now)


class Stubborn(PairRound):
    """Its clock is slow where it counts."""

    def _hopeless(self, now: float) -> str | None:
        return super()._hopeless(now - 3.0)


class Nervous(PairRound):
    """Gives up when anybody is doubted, of its group or not."""

    def _hopeless(self, now: float) -> str | None:
        doubted = [peer for peer in self._view.members if not self._view.usable(peer)]
        return f"{doubted} may be gone" if doubted else super()._hopeless(now)


class Shy(PairRound):
    """Calls nobody when there are more than two."""

    def _open_streams(self, now: float) -> list[Action]:
        return super()._open_streams(now) if len(self.group) == 2 else []


class Impatient(PairRound):
    """Gives up soon after it has staged."""

    def _hopeless(self, now: float) -> str | None:
        soon = self._staged and now > self.patience_until - 1.5
        return "this takes too long" if soon else super()._hopeless(now)


class Careless(MeetingWorld):
    """Lets a partner's stream in whatever its round, and nobody hears where the others are."""

    def admits(self, part: Attendance, stream: Stream) -> bool:
        return stream.ends[0].name in part.group

    def _gossip(self, peer: SimPeer) -> None:
        pass


def found(worlds: Iterable[MeetingWorld]) -> Iterator[str]:
    """The names of the checks that object, one after the other."""
    for world in worlds:
        world.play()
        for text in violations(world):
            yield text.split(":")[0]


@pytest.mark.parametrize(
    ("check", "machine"),
    [
        ("twice", Again),
        ("missing", Hurried),
        ("unstaged", Hasty),
        ("overdue", Stubborn),
        ("delayed", Nervous),
        ("unsettled", Shy),
        ("torn", Impatient),
    ],
)
def test_a_spoiled_machine_is_caught(check: str, machine: type[PairRound]) -> None:
    assert check in found(random_world(seed, machine) for seed in range(SPOILED_SCHEDULES))


def test_a_round_that_is_mixed_with_another_is_caught() -> None:
    world = Careless(2, 2, 0, Faults())
    world.late_s["a", 0] = 2 * world.interval_s + JITTER_S  # its partner is in round 2 by then
    assert "mixed" in found([world])
