"""Real workers in pairs: where the specification says without faults, and further on with them."""

import itertools
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from murmuration.coordinator.report.status import ask
from murmuration.worker.config import load_config
from tests.support.gate import Gate, gate, gates
from tests.support.head_starts import AnchorPrefetch
from tests.support.held_rounds import HeldRound, held_round
from tests.support.pair_accounts import PairAccounts
from tests.support.reference import reference_hashes
from tests.support.shaped import relayed_swarm
from tests.support.watched import Hold, program
from tests.support.workers import (
    PATIENCE_S,
    QUICK,
    SMALL,
    Event,
    Hashes,
    Swarm,
    WorkerProcess,
    running_swarm,
    settings_of,
)

# A partner that a busy machine holds up is waited for, whoever is in doubt of it.
PATIENT = settings_of(
    rounds__patience_s=60, membership__probe_timeout_s=5, membership__suspicion_factor=20
)


@pytest.mark.parametrize(
    ("preset", "extra"),
    [
        ("noloco", {}),
        ("noloco", {"diloco__consensus": "false"}),
        ("noloco", {"diloco__shared_momentum": "false", "diloco__outer_lr": 0.7}),
        ("streaming-noloco", {"diloco__overlap_steps": 3}),
    ],
    ids=["noloco", "without consensus", "the paper's update", "streaming-noloco in 4 bits"],
)
def test_four_workers_in_pairs_equal_the_reference(
    tmp_path: Path, preset: str, extra: Mapping[str, object]
) -> None:
    settings = [*SMALL, *settings_of(run__steps=25, run__seed=3, diloco__inner_steps=6, **extra)]
    with running_swarm(4, tmp_path, "--preset", preset, *settings, *PATIENT) as swarm:
        swarm.start_all()
        results = swarm.wait()
        rounds = [event for name in swarm.names for event in swarm.workers[name].of("round")]
        head_starts = AnchorPrefetch({name: swarm.workers[name].events for name in swarm.names})
    assert {result["rounds_failed"] for result in results.values()} == {0}
    consensus = "diloco__consensus" not in extra
    assert {event["contributors"] for event in rounds} == ({2, 4} if consensus else {2})
    hashes = {peer: Hashes.of(result) for peer, result in results.items()}
    assert len(set(hashes.values())) == (1 if consensus else 2)  # who met last hold the same
    config = load_config(None, settings[1::2], preset)
    if config.plan.overlap_steps == 0:  # else whether one comes in time is up to the network
        assert (len(head_starts) > 0) == config.plan.shared_momentum
    assert hashes == reference_hashes(config, swarm.names, head_starts)


FAULTY = (*SMALL, *QUICK, *settings_of(run__steps=120, diloco__inner_steps=10))


def test_survivors_of_a_killed_worker_go_on_and_agree(tmp_path: Path) -> None:
    held = gate(tmp_path, 45)
    with running_swarm(4, tmp_path, "--preset", "noloco", *FAULTY, *held.settings) as swarm:
        swarm.start_all()
        victim = swarm.workers["w2"]
        victim.wait_for_round(3)
        victim.send(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        for name in ("w0", "w1", "w3"):
            swarm.workers[name].wait_for(
                lambda e: e["event"] == "member" and e["health"] == "dead", "a death"
            )
        with held.opened():
            results = swarm.wait("w0", "w1", "w3")
    assert {result["step"] for result in results.values()} == {120}
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert sum(result["rounds_failed"] for result in results.values()) <= 1
    assert swarm.workers["w0"].of("round")[-1]["contributors"] == 3


def test_a_stopped_worker_holds_up_nobody_and_comes_back(tmp_path: Path) -> None:
    held = gate(tmp_path, 405)
    settings = [*FAULTY, *settings_of(run__steps=480), *held.settings]
    with running_swarm(4, tmp_path, "--preset", "noloco", *settings) as swarm:
        swarm.start_all()
        stopped = swarm.workers["w3"]
        stopped.wait_for_round(3)
        stopped.send(signal.SIGSTOP)
        for name in ("w0", "w1", "w2"):
            swarm.workers[name].wait_for_round(38)
        stopped.send(signal.SIGCONT)
        stopped.wait_for(lambda e: e["event"] == "skipped", "where the others are")
        swarm.wait_until_all_train()
        with held.opened():
            results = swarm.wait()
    assert {result["step"] for result in results.values()} == {480}
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert results["w3"]["steps"] < min(results[name]["steps"] for name in ("w0", "w1", "w2"))
    assert stopped.of("round")[-1]["contributors"] == 4


# ----------------------------------------------------------------- faults in the midst of a round

VICTIM, SURVIVORS = "w2", ("w0", "w1", "w3")
WORKERS = (*SURVIVORS, VICTIM)
HELD = 3  # the round
# Whoever waits for a last word that does not come gives it up within seconds.
CUT = settings_of(rounds__patience_s=3, rounds__slack_s=3)
AMID = (*SMALL, *QUICK, *settings_of(run__steps=160, diloco__inner_steps=10))
PLAN = load_config(None, AMID[1::2], "noloco").plan
WORSE = 1.05  # of 16 rounds each one lost costs a percent


def watched(folder: Path, hold: Hold | None = None) -> dict[str, Sequence[str]]:
    """Programs of workers that keep accounts; of the victim that stands still."""
    return {name: program(folder / name, hold if name == VICTIM else None) for name in WORKERS}


@pytest.fixture(scope="module")
def undisturbed_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The validation loss of a swarm to which nothing happens."""
    settings = ("--preset", "noloco", *AMID, *PATIENT)
    with running_swarm(4, tmp_path_factory.mktemp("run"), *settings) as swarm:
        swarm.start_all()
        results = swarm.wait()
    assert sum(result["rounds_failed"] for result in results.values()) == 0
    (loss,) = {result["val_loss"] for result in results.values()}
    return float(loss)


def assert_no_harm(
    results: Mapping[str, Event], accounts: PairAccounts, undisturbed_loss: float
) -> None:
    """Whoever is alive has the schedule behind it, one model and a loss like that of others; what
    was applied was of one round, and once."""
    assert {result["step"] for result in results.values()} == {160}
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert accounts.twice() == []
    assert accounts.mixed() == []
    for result in results.values():
        assert result["val_loss"] <= WORSE * undisturbed_loss


def failed(worker: WorkerProcess) -> dict[int, set[str]]:
    """The rounds that came to nothing for a worker, and for whom it waited."""
    return {event["round"]: set(event["waiting_for"]) for event in worker.of("round_failed")}


def wait_for_the_loss(swarm: Swarm, partner: str) -> None:
    """Until the victim is held for dead by all, and its partner has given the round with it up."""
    for name in SURVIVORS:
        awaited = {"dead", HELD} if name == partner else {"dead"}

        def seen(event: Event, awaited: set[object] = awaited) -> bool:
            awaited.discard(event.get("health"))
            if event["event"] == "round_failed":
                awaited.discard(event["round"])
            return not awaited

        swarm.workers[name].wait_for(seen, "a death, and the lost round")


def wait_for_the_cut(swarm: Swarm, partner: str) -> None:
    """Until everyone knows of the link that is cut, and both have the held round behind them.

    Else the victim's next partner would wait for it, maybe longer than its patience.
    """
    for name in (partner, VICTIM):
        ended = ("round_failed",) if name == partner else ("round", "round_failed")

        def seen(event: Event, ended: Sequence[str] = ended) -> bool:
            return event["event"] in ended and event["round"] == HELD

        swarm.workers[name].wait_for(seen, "the end of the held round")
    cut, deadline = {VICTIM: [partner], partner: [VICTIM]}, time.monotonic() + PATIENCE_S
    for name in WORKERS:
        known: dict[str, list[str]] = {}
        while known != cut:
            assert time.monotonic() < deadline, f"{name} knows of {known}"
            members = ask(swarm.addresses[name])["members"]
            known = {m["peer"]: m["unreachable"] for m in members if "unreachable" in m}


def partner_in(swarm: Swarm, begun: Gate, held: HeldRound) -> str:
    """The victim's in the held round. All begin together: who starts a second later than others
    would find them rounds ahead, and follow."""
    for worker in swarm.workers.values():
        worker.wait_for(lambda e: e["event"] == "started", "start")
    with begun.opened():
        return held.partner()


def alone_with(accounts: PairAccounts, partner: str) -> bool:
    """Whether the victim has applied the round that its partner has lost. It may have had the
    partner's last word, and the partner not its own: what no protocol between two can settle."""
    assert HELD not in {entry.round for entry in accounts.applied(partner)}
    return HELD in {entry.round for entry in accounts.applied(VICTIM)}


def marks_until_left(worker: WorkerProcess, other: str) -> list[list[str]]:
    """Whom the worker could not reach, each time that it changed, while `other` ran."""
    left = {"event": "member", "peer_changed": other, "health": "left"}
    running = itertools.takewhile(lambda e: not left.items() <= e.items(), worker.events)
    return [event["peers"] for event in running if event["event"] == "unreachable"]


@pytest.mark.parametrize("point", ["contribution", "staged"])
def test_a_worker_killed_amid_an_exchange_harms_nobody(
    tmp_path: Path, point: str, undisturbed_loss: float
) -> None:
    begun, noticed = gates(tmp_path, 5, 45)
    settings = ("--preset", "noloco", *AMID, *noticed.settings)
    with (
        held_round(tmp_path, HELD, point) as held,
        running_swarm(4, tmp_path, *settings) as swarm,
    ):
        swarm.programs |= watched(tmp_path / "accounts", held.hold)
        swarm.start_all()
        partner = partner_in(swarm, begun, held)
        swarm.workers[VICTIM].send(signal.SIGKILL)
        wait_for_the_loss(swarm, partner)
        with noticed.opened():
            results = swarm.wait(*SURVIVORS)
    accounts = PairAccounts(tmp_path / "accounts", PLAN)
    assert_no_harm(results, accounts, undisturbed_loss)
    for name in SURVIVORS:
        lost = {HELD: {VICTIM}} if name == partner else {}
        assert failed(swarm.workers[name]) == lost
        assert {entry.round for entry in accounts.applied(name)} == set(range(16)) - set(lost)
        assert swarm.workers[name].of("round")[-1]["contributors"] == 3


@pytest.mark.parametrize("point", ["contribution", "staged"])
def test_a_worker_stopped_amid_an_exchange_harms_nobody(
    tmp_path: Path, point: str, undisturbed_loss: float
) -> None:
    begun, noticed, end = gates(tmp_path, 5, 45, 135)
    settings = ("--preset", "noloco", *AMID, *noticed.settings)
    with (
        held_round(tmp_path, HELD, point) as held,
        running_swarm(4, tmp_path, *settings) as swarm,
    ):
        swarm.programs |= watched(tmp_path / "accounts", held.hold)
        swarm.start_all()
        partner, stopped = partner_in(swarm, begun, held), swarm.workers[VICTIM]
        stopped.send(signal.SIGSTOP)
        wait_for_the_loss(swarm, partner)
        with noticed.opened():
            for name in SURVIVORS:
                swarm.workers[name].wait_for_round(11)
            without = {name: failed(swarm.workers[name]) for name in SURVIVORS}
            with held.gate.opened():
                stopped.send(signal.SIGCONT)
                stopped.wait_for(lambda e: e["event"] == "skipped", "where the others are")
                swarm.wait_until_all_train()
                with end.opened():
                    results = swarm.wait()
    accounts = PairAccounts(tmp_path / "accounts", PLAN)
    assert_no_harm(results, accounts, undisturbed_loss)
    assert without == {name: {HELD: {VICTIM}} if name == partner else {} for name in SURVIVORS}
    assert alone_with(accounts, partner) <= (point == "staged")
    assert results[VICTIM]["steps"] < min(results[name]["steps"] for name in SURVIVORS)
    assert {worker.of("round")[-1]["contributors"] for worker in swarm.workers.values()} == {4}


def test_a_link_cut_amid_an_exchange_and_for_good_harms_nobody(
    tmp_path: Path, undisturbed_loss: float
) -> None:
    begun, noticed = gates(tmp_path, 5, 45)
    settings = ("--preset", "noloco", *AMID, *CUT, *noticed.settings)
    with held_round(tmp_path, HELD, "staged") as held:
        programs = watched(tmp_path / "accounts", held.hold)
        with relayed_swarm(4, tmp_path, "100mbit", settings, programs=programs) as (swarm, relay):
            partner = partner_in(swarm, begun, held)
            relay.cut(VICTIM, partner)
            with held.gate.opened():
                wait_for_the_cut(swarm, partner)
                with noticed.opened():
                    results = swarm.wait()
    accounts = PairAccounts(tmp_path / "accounts", PLAN)
    assert_no_harm(results, accounts, undisturbed_loss)
    alone_with(accounts, partner)
    assert marks_until_left(swarm.workers[VICTIM], partner) == [[partner]]
    assert {worker.of("round")[-1]["contributors"] for worker in swarm.workers.values()} == {4}
    for name in WORKERS:
        lost = failed(swarm.workers[name])
        if name == VICTIM:  # it has had its partner's last word, or not
            assert lost in ({}, {HELD: {partner}})
        else:
            assert lost == ({HELD: {VICTIM}} if name == partner else {})
        assert {entry.round for entry in accounts.applied(name)} == set(range(16)) - set(lost)
