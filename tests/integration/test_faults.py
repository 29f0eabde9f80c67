"""Killed workers, a worker that comes back, a coordinator that goes away: the others finish."""

import json
import signal

from murmuration.worker.training import checkpoint
from tests.support.full_disk import fill_disk_of, make_room_for
from tests.support.gates import gate, gates
from tests.support.leased_task import counts
from tests.support.workers import (
    ENDLESS,
    QUICK,
    SMALL,
    Hashes,
    WorkerProcess,
    free_addresses,
    running_swarm,
    settings_of,
)


def test_a_worker_comes_back_and_ends_equal(tmp_path):
    settings = [*SMALL, *QUICK, *settings_of(run__steps=48, diloco__inner_steps=4)]
    held, often = gate(tmp_path, 34), settings_of(checkpoint__every_s=0.001)
    with running_swarm(4, tmp_path, *settings, *held.settings) as swarm:
        for name in ("w0", "w1", "w2"):
            swarm.start(name)
        swarm.start("w3", *often)
        killed = swarm.workers["w3"]
        killed.wait_for_all(
            "a round and a checkpoint",
            lambda e: e["event"] == "round" and e["round"] >= 1,
            lambda e: e["event"] == "checkpoint" and e["step"] > 0,
        )
        killed.send(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        swarm.workers["w0"].wait_for_round(7)  # the others have gone on without it
        back = swarm.start("w3", *often)  # the same command line as before
        assert back.wait_for(lambda e: e["event"] == "resumed", "resuming")["step"] > 0
        adopted = back.wait_for(lambda e: e["event"] == "adopted", "adoption")
        swarm.wait_until_all_train()
        with held.opened():
            results = swarm.wait()
    assert adopted["step"] >= 28
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert results["w3"]["steps"] < results["w0"]["steps"] == 48
    # A busy machine may hold up a peer in one of them for longer than the short patience here.
    later = [event for event in swarm.workers["w0"].of("round") if event["round"] > 7]
    assert max(event["contributors"] for event in later) == 4


def test_the_coordinator_is_optional(tmp_path):
    (address,) = free_addresses(1)
    coordinator = WorkerProcess(["coordinator", "--listen", address, "--json"], "coordinator")
    settings = [*SMALL, *QUICK, *settings_of(run__steps=30, diloco__inner_steps=5)]
    held = gate(tmp_path, 13)
    with running_swarm(3, tmp_path, *settings, *held.settings) as swarm:
        swarm.ended.append(coordinator)
        swarm.addresses = dict.fromkeys(swarm.names, "127.0.0.1:0")  # nobody else is named
        for name in swarm.names:
            swarm.workers[name] = WorkerProcess(
                ["up", "--name", name, "--coordinator", address, "--min-peers", "3",
                 "--out", str(tmp_path / name), "--json", *settings, *held.settings],
                name,
            )  # fmt: skip
        swarm.workers["w0"].wait_for_round(1)
        coordinator.send(signal.SIGKILL)
        coordinator.wait()
        with held.opened():
            results = swarm.wait()
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert {result["rounds_completed"] for result in results.values()} == {6}


def test_a_worker_joins_through_the_coordinator_which_ends_with_the_run(tmp_path):
    (address,) = free_addresses(1)
    coordinator = WorkerProcess(
        ["coordinator", "--listen", address, "--expect", "3", "--json", "--out", str(tmp_path)],
        "coordinator",
    )
    settings = [*SMALL, *QUICK, *settings_of(run__steps=50, diloco__inner_steps=5)]
    held = gate(tmp_path, 13)
    with running_swarm(2, tmp_path, *settings, *held.settings) as swarm:
        swarm.ended.append(coordinator)
        swarm.start_all("--coordinator", address)
        swarm.workers["w0"].wait_for_round(1)
        newcomer = swarm.join("new", address, *held.settings)
        newcomer.wait_for(lambda e: e["event"] == "adopted", "adoption")
        with held.opened():
            results = swarm.wait("w0", "w1", "new")
        assert coordinator.wait() == 0
    assert len({Hashes.of(result) for result in results.values()}) == 1
    assert {event["peer"] for event in coordinator.of("member")} == {"new", "w0", "w1"}


def test_a_full_disk_ends_no_training(tmp_path):
    """It warns once, trains on, saves again when there is room, and says at its end if none is."""
    often = settings_of(checkpoint__every_s=0.001)
    with running_swarm(2, tmp_path, *ENDLESS, *QUICK, *often) as swarm:
        swarm.start_all()
        worker = swarm.workers["w0"]
        worker.wait_for_all(
            "a round and a checkpoint",
            lambda e: e["event"] == "round",
            lambda e: e["event"] == "checkpoint",
        )
        for times in (1, 2):
            fill_disk_of(worker)
            worker.wait_for_all(
                "a warning of each",
                lambda e: e["event"] == "warning" and "events are missing in" in e["text"],
                lambda e: e["event"] == "warning" and "no checkpoint at step" in e["text"],
            )
            worker.wait_for_round(worker.of("round")[-1]["round"] + 3)
            for what in ("events are missing in", "no checkpoint at step"):
                assert sum(what in event["text"] for event in worker.of("warning")) == times
            if times == 1:
                make_room_for(worker)
                saved = worker.wait_for(lambda e: e["event"] == "checkpoint", "room")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 8, worker.errors
        assert worker.errors == ""
        assert worker.result["exit_code"] == 8
        assert checkpoint.load(tmp_path / "w0" / "checkpoints")[0].values["step"] >= saved["step"]
        events = (tmp_path / "w0" / "events.jsonl").read_text().splitlines()
        (missing,) = [e for e in map(json.loads, events) if "missing here" in e.get("text", "")]
        assert int(missing["text"].split()[0]) >= 3


OF_BATCH = 4
OF_STEPS = 80
SAMPLES = 500  # two workers draw 640


def test_an_epoch_goes_on_after_a_kill_and_after_a_stop_of_all(tmp_path):
    record, text = tmp_path / "record", tmp_path / "text"
    record.mkdir()
    trained = 32 * SAMPLES + 1
    text.write_bytes(bytes(n % 251 for n in range(trained * 10 // 9 + 1)))
    first, second = gates(tmp_path, 10, 23)
    settings = [*SMALL, *QUICK, *first.settings]
    settings += settings_of(
        task__name='"tests.support.leased_task:Recorded"',
        task__data='"leased"',
        task__record=f'"{record}"',
        task__text=f'"{text}"',
        task__batch_size=OF_BATCH,
        run__steps=OF_STEPS,
        diloco__inner_steps=5,
    )
    with running_swarm(3, tmp_path, *settings) as swarm:
        swarm.start_all()
        victim = swarm.workers["w1"]
        victim.wait_for_round(0)
        victim.send(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        swarm.start("w1").wait_for(lambda e: e["event"] == "started", "its return")
        with first.opened():
            for name in ("w0", "w2"):  # which need not know of the third by then
                swarm.workers[name].wait_for_round(2)
            for worker in swarm.workers.values():
                worker.send(signal.SIGTERM)
            with second.opened():
                swarm.wait()
        assert 0 in counts(record, 0, SAMPLES)  # there is something left for the rest
        with first.opened(), second.opened():
            swarm.start_all("--resume")
            swarm.wait()
    found = counts(record, 0, SAMPLES)
    assert len(found) == SAMPLES
    assert min(found) == 1
    assert sum(found) - SAMPLES <= 2 * OF_BATCH  # as much as a crash may repeat
    assert any(counts(record, 1, SAMPLES))
