"""Random schedules of mean rounds in the simulator: what must hold in every one.

With a crash, 1 to 5 % of the schedules end with two reductions of one shard applied by different
survivors; with four wrong suspicions in four seconds 17 %, with wrongly declared deaths 26 %.
Anti-entropy repairs those (see `test_crashes`); anything else would be a defect.
`python -m tests.lab schedules means` plays 100,000 of them.
"""

from collections.abc import Callable
from random import Random

import pytest

from murmuration.worker.membership import Health
from murmuration.worker.simulation.scenario import Crash, Freeze
from tests.support.faulty_swarm import BrittleStreams, Delay, Doubt, Fault, Late
from tests.support.mean_schedules import Run, accounts, play, random_run, violations

SCHEDULES = 20
PEERS = (2, 3, 4, 5)
ROUNDS = 2
DURING_S = 4.0


def crash(rng: Random, peers: int) -> list[Fault]:
    return [Crash(rng.randrange(peers), rng.uniform(0.0, DURING_S))]


def breaking(rng: Random, peers: int) -> list[Fault]:
    return [BrittleStreams(0.3, 0.0, DURING_S)]


def late(rng: Random, peers: int) -> list[Fault]:
    """Later than the others' grace."""
    return [Late(rng.randrange(peers), 0.0, rng.uniform(4.0, 8.0))]


def suspicions(rng: Random, peers: int) -> list[Fault]:
    plan = list[Fault]()
    for _ in range(4):
        observer, peer = rng.sample(range(peers), 2)
        from_s = rng.uniform(0.0, DURING_S)
        plan.append(Doubt(observer, peer, from_s, from_s + rng.uniform(0.1, 2.0)))
    return plan


def false_deaths(rng: Random, peers: int) -> list[Fault]:
    plan = suspicions(rng, peers)
    for each in list(plan):
        if isinstance(each, Doubt) and rng.random() < 0.5:
            to_s = each.to_s + rng.uniform(0.1, 2.0)
            plan.append(Doubt(each.observer, each.peer, each.to_s, to_s, Health.DEAD))
    return plan


Kind = Callable[[Random, int], list[Fault]]


def runs(*kinds: Kind) -> list[Run]:
    """Schedules with these faults, in each of which all that must hold has held."""
    played = []
    for seed in range(SCHEDULES if kinds else len(PEERS)):
        rng, peers = Random(seed), PEERS[seed % len(PEERS)]
        run = play(peers, tuple(f for kind in kinds for f in kind(rng, peers)), seed, ROUNDS)
        assert list(violations(run)) == [], seed
        played.append(run)
    return played


def failures(run: Run) -> int:
    return sum(bool(outcome.reason) for outcome in run.record.outcomes)


@pytest.mark.parametrize("way_s", [1.35, 2.0])
def test_nobody_behind_a_slow_link_is_taken_for_a_liar(way_s):
    """The second is later than is waited for, so that each passes the other over as a reducer."""
    assert not [*violations(play(4, (Delay(0, 1, 0.0, 60.0, way_s),), rounds=5))]


@pytest.mark.parametrize("kinds", [(), (breaking,)], ids=["undisturbed", "streams break"])
def test_everyone_counts_everyone(kinds):
    for run in runs(*kinds):
        assert len(run.record.outcomes) == ROUNDS * len(run.peers)
        assert not failures(run)
        assert len(run.record.answers) == ROUNDS * len(run.peers)
        for (answer,) in run.record.answers.values():
            assert len(answer.contributors) == len(run.peers)


def test_a_straggler_is_late_and_takes_the_answer():
    """The others close without it, and it applies what they applied."""
    for run in runs(late):
        assert not failures(run)
        assert not run.disagrees
        for (_, key, _), (answer, *_) in run.record.answers.items():
            assert key.round or len(answer.contributors) == len(run.peers) - 1


def test_survivors_of_a_crash_finish():
    played = runs(crash, breaking)
    assert all(peer.done for run in played for peer in run.live)
    assert not any(failures(run) for run in played if not run.disagrees)
    assert sum(run.disagrees for run in played) <= 0.05 * SCHEDULES


def test_who_dies_while_it_stands_still_stays_dead():
    run = play(4, (Freeze(1, 1.0, 9.0), Crash(1, 2.0)), rounds=12)
    assert list(violations(run)) == []
    assert not run.swarm.view(0).live("p00001")


def test_wrong_suspicions_stop_nobody():
    assert sum(run.disagrees for run in runs(suspicions)) <= 0.2 * SCHEDULES


def test_wrongly_declared_deaths_stop_nobody():
    played = runs(false_deaths)
    assert sum(run.disagrees for run in played) <= 0.5 * SCHEDULES
    outcomes = sum(len(run.record.outcomes) for run in played)
    assert sum(failures(run) for run in played) <= 0.02 * outcomes


@pytest.mark.parametrize(("codec", "merge"), [("fp32", "reset"), ("sign", "keep")])
@pytest.mark.parametrize(("seeds", "shuffled"), [(range(3), False), (range(20, 23), True)])
def test_random_plans_of_faults(seeds, codec, merge, shuffled):
    """Every element of every pseudo-gradient counts once, or is kept: see `accounts`."""
    for seed in seeds:
        played = random_run(seed, codec, merge, shuffled=shuffled)
        assert list(violations(played)) == [], seed
        assert merge == "reset" or set(accounts(played)) <= {"once"}, seed


@pytest.mark.parametrize(
    "seed",
    [36598, 63203, 88361],
    ids=["the last contribution is withdrawn", "the group dies", "and others doubt"],
)
def test_plans_that_were_violated(seed):
    assert list(violations(random_run(seed))) == []
