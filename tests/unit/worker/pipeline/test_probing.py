"""Whom a peer measures, and when: everyone soon, newcomers too, idle links now and then."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from tests.unit.worker.pipeline.members import cards_of
from worker.membership import Health, Member, Phase
from worker.pipeline.probing import Probing


class Prober:
    """p0 with a clock; a probe takes a tenth of a second. `cut` are those that do not answer."""

    def __init__(self, members: list[Member]) -> None:
        self.members, self.now, self.cut = members, 0.0, set[str]()
        self.measured: dict[str, float] = {}
        self.probing = Probing("p0", self.measured.get)

    def during(self, seconds: float) -> list[tuple[float, str]]:
        """(when, whom) of the probes begun from now on."""
        began, end = [], self.now + seconds
        while self.now < end:
            member = self.probing.next(self.members, self.now)
            if member is not None:
                began.append((self.now, member.peer))
                self.now = round(self.now + 0.1, 3)
                answers = member.peer not in self.cut
                if answers:
                    self.measured[member.peer] = self.now
                self.probing.ended(member.peer, answers, self.now)
            self.now = round(self.now + 0.05, 3)
        return began


def names(probes: list[tuple[float, str]]) -> list[str]:
    return sorted(peer for _, peer in probes)


def test_every_peer_of_every_stage_is_measured_once_one_a_second() -> None:
    prober = Prober(cards_of(0, 0, 1, 1, 2))
    probes = prober.during(250.0)
    assert names(probes) == ["p1", "p2", "p3", "p4"]
    times = [at for at, _ in probes]
    assert all(after - before >= 1.0 for before, after in pairwise(times))
    assert times[-1] < 6.0


def test_one_probe_at_a_time() -> None:
    probing = Probing("p0", {}.get)
    members = cards_of(0, 1, 2)
    first = probing.next(members, 0.0)
    assert first is not None
    assert probing.next(members, 60.0) is None
    probing.ended(first.peer, answered=True, now=60.0)
    assert probing.next(members, 60.5) is None
    assert probing.next(members, 61.0) is not None


def test_a_newcomer_is_measured_soon() -> None:
    prober = Prober(cards_of(0, 1, 1))
    prober.during(60.0)
    prober.members = cards_of(0, 1, 1, 2)
    ((at, peer),) = prober.during(60.0)
    assert peer == "p3"
    assert at <= 61.0


def test_who_is_not_ready_or_suspected_is_not_measured() -> None:
    members = cards_of(0, 1, 1, 2)
    members[1] = replace(members[1], phase=Phase.STARTING)
    members[2] = replace(members[2], health=Health.SUSPECT)
    prober = Prober(members)
    assert names(prober.during(60.0)) == ["p3"]
    prober.members = cards_of(0, 1, 1, 2)
    assert names(prober.during(60.0)) == ["p1", "p2"]
    assert Prober([replace(members[0], phase=Phase.STARTING), *members[1:]]).during(60.0) == []


def test_a_probe_that_failed_is_tried_again_after_a_while() -> None:
    prober = Prober(cards_of(0, 1, 1))
    prober.cut = {"p2"}
    probes = prober.during(70.0)
    assert Counter(names(probes)) == {"p1": 1, "p2": 3}
    failed = [at for at, peer in probes if peer == "p2"]
    assert all(30.0 <= b - a < 32.0 for a, b in pairwise(failed))
    prober.cut = set()
    assert names(prober.during(100.0)) == ["p2"]


def test_an_idle_link_is_measured_anew_and_a_busy_one_is_not() -> None:
    prober = Prober(cards_of(0, 1, 1))
    prober.during(200.0)
    prober.measured["p1"] = 200.0  # real traffic
    assert names(prober.during(150.0)) == ["p2"]
    assert names(prober.during(200.0)) == ["p1"]


def test_in_a_large_swarm_a_peer_measures_32_and_each_is_measured_about_as_often() -> None:
    members = cards_of(*[n % 4 for n in range(60)])
    measured: Counter[str] = Counter()
    for member in members:
        known: dict[str, float] = {}
        probing = Probing(member.peer, known.get)
        for second in range(40):
            due = probing.next(members, 2.0 * second)
            if due is not None:
                known[due.peer] = 2.0 * second
                probing.ended(due.peer, answered=True, now=2.0 * second)
        assert len(known) == 32
        assert member.peer not in known
        measured.update(known.keys())
    assert len(measured) == 60
    assert max(measured.values()) < 2 * 32
