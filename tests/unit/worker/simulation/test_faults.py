"""Plans of faults: one seed gives one plan, and what each fault does to links and views."""

from collections import Counter
from collections.abc import Callable

import pytest

from murmuration.worker.membership import Health
from murmuration.worker.simulation import Scenario
from murmuration.worker.simulation.network import SimulatedStream
from murmuration.worker.simulation.scenario import Crash, Freeze, Partition, last_s
from tests.support.fault_plans import random_faults
from tests.support.faulty_swarm import (
    BreakStreams,
    BrittleStreams,
    Cut,
    Delay,
    Doubt,
    Fault,
    FaultySwarm,
    Late,
)


class Watcher:
    """A peer that only notes what happens to it."""

    def __init__(self, swarm: FaultySwarm, number: int) -> None:
        self._swarm, self._number = swarm, number
        self.seen: list[tuple[float, dict[str, Health]]] = []
        self.breaks: list[float] = []
        self.dead_at: float | None = None

    def viewed(self, changed: frozenset[str]) -> None:
        members = self._swarm.view(self._number).members
        self.seen.append((self._swarm.clock.now, {n: members[n].health for n in sorted(changed)}))

    def died(self) -> None:
        self.dead_at = self._swarm.clock.now

    def broken(self, stream: SimulatedStream) -> None:
        self.breaks.append(self._swarm.clock.now)


def watched(*faults: Fault, peers: int = 4) -> tuple[FaultySwarm, list[Watcher]]:
    swarm = FaultySwarm(Scenario(peers=peers), faults)
    swarm.endpoints = watchers = [Watcher(swarm, number) for number in range(peers)]
    return swarm, watchers


def run(swarm: FaultySwarm, until_s: float) -> None:
    swarm.clock.at(until_s, lambda: None)
    swarm.clock.run(lambda: swarm.clock.now >= until_s, until_s)


def test_a_seed_is_a_plan_and_every_kind_occurs() -> None:
    plans = [random_faults(seed, 2 + seed % 5, 20.0, 10.0) for seed in range(300)]
    assert plans[7] == random_faults(7, 4, 20.0, 10.0)
    kinds = Counter(type(fault) for plan in plans for fault in plan)
    assert min(kinds.values()) > 20
    assert len(kinds) == 9
    assert sum(len(plan) < 3 for plan in plans) > 20
    for number, plan in enumerate(plans):
        gone = [fault.peer for fault in plan if isinstance(fault, Crash | Freeze)]
        assert len(set(gone)) == len(gone) < 2 + number % 5


def test_a_plan_is_over_when_its_last_fault_is() -> None:
    assert last_s(()) == 0.0
    plan = (Crash(0, 9.0), Freeze(1, 3.0, 4.0))
    assert last_s(plan) == 9.0
    assert last_s((*plan, Partition(frozenset({0}), 1.0, 11.0))) == 11.0


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (Crash(1, 1.0), {Health.SUSPECT, Health.DEAD}),
        (Freeze(1, 1.0, 5.0), {Health.SUSPECT, Health.ALIVE}),
        (Freeze(1, 1.0, 50.0), {Health.SUSPECT, Health.DEAD, Health.ALIVE}),
        (Freeze(1, 1.0, 2.0), set()),
    ],
    ids=["crash", "freeze", "long freeze", "short freeze"],
)
def test_the_others_notice_as_late_as_a_failure_detector(fault: Fault, wrong: set[Health]) -> None:
    swarm, watchers = watched(fault)
    run(swarm, 80.0)
    for number in (0, 2, 3):
        assert {health["p00001"] for _, health in watchers[number].seen} == wrong
        assert all(time_s >= 4.0 for time_s, _ in watchers[number].seen)
    assert watchers[1].dead_at == (1.0 if isinstance(fault, Crash) else None)


def test_a_crash_is_final() -> None:
    swarm, watchers = watched(Freeze(1, 1.0, 8.0), Crash(1, 2.0))
    run(swarm, 80.0)
    assert watchers[0].seen[-1][1] == {"p00001": Health.DEAD}


@pytest.mark.parametrize("fault", [Cut(0, 1, 1.0, 20.0), Partition(frozenset({0, 2}), 1.0, 20.0)])
def test_what_is_cut_off_carries_nothing_and_is_known_after_a_while(fault: Fault) -> None:
    swarm, _ = watched(fault)
    stream, seen = swarm.network.open(0, 1), list[float]()

    def say() -> None:
        swarm.network.open(0, 1).send(0, lambda: seen.append(swarm.clock.now))

    for time_s in (0.5, 2.0, 30.0):
        swarm.clock.at(time_s, say)
    run(swarm, 12.0)
    assert stream.ended
    view = swarm.view(3 if isinstance(fault, Cut) else 0)
    assert not (view.reach("p00000", "p00001") and view.live("p00001"))
    run(swarm, 40.0)
    assert swarm.view(0).reach("p00000", "p00001")
    assert swarm.view(0).usable("p00001")
    assert seen == pytest.approx([0.55, 30.05])


def test_two_that_are_cut_apart_take_each_other_for_dead() -> None:
    swarm, _ = watched(Cut(0, 1, 1.0, 20.0), peers=2)
    run(swarm, 12.0)
    assert not swarm.view(0).live("p00001")
    assert not swarm.view(1).live("p00000")
    run(swarm, 40.0)
    assert swarm.view(0).usable("p00001")


def test_a_doubt_is_one_peers_own() -> None:
    swarm, watchers = watched(Doubt(0, 1, 1.0, 3.0, Health.DEAD))
    run(swarm, 10.0)
    healths = [health["p00001"] for _, health in watchers[0].seen]
    assert healths == [Health.DEAD, Health.ALIVE]
    assert [watcher.seen for watcher in watchers[1:]] == [[], [], []]


def say_on_streams(count: int) -> Callable[[FaultySwarm], list[float]]:
    def say(swarm: FaultySwarm) -> list[float]:
        seen = list[float]()
        for _ in range(count):
            stream = swarm.network.open(0, 1)
            for _ in range(12):
                stream.send(0, lambda: seen.append(swarm.clock.now))
        return seen

    return say


def test_brittle_streams_break_at_one_of_their_first_messages() -> None:
    swarm, watchers = watched(BrittleStreams(0.5, 0.0, 5.0))
    run(swarm, 1.0)
    say_on_streams(200)(swarm)
    run(swarm, 5.5)
    assert 60 < len(watchers[0].breaks) < 140
    seen = say_on_streams(20)(swarm)
    run(swarm, 6.5)
    assert len(seen) == 240


def test_streams_of_a_peer_break_and_messages_take_longer() -> None:
    swarm, watchers = watched(Delay(0, 1, 0.0, 5.0, 2.0), BreakStreams(3, 0.5))
    kept, lost = swarm.network.open(0, 1), swarm.network.open(0, 3)
    run(swarm, 0.1)
    seen = list[float]()
    kept.send(0, lambda: seen.append(swarm.clock.now))
    run(swarm, 6.0)
    assert seen == pytest.approx([2.15])
    assert lost.ended
    assert watchers[3].breaks == [0.5]


def test_who_is_late_takes_longer_for_its_steps_of_that_time() -> None:
    swarm, _ = watched(Late(1, 3.0, 2.5))
    assert swarm.late_s(1, 0.0, 3.0) == 0.0
    assert swarm.late_s(1, 0.0, 3.1) == 2.5
    assert swarm.late_s(0, 0.0, 3.1) == 0.0
