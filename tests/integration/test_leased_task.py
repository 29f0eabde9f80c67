"""`[task] data = "leased"`: workers share an epoch, through a kill and a stop of all."""

import signal
from pathlib import Path

from tests.support.gate import gates
from tests.support.leased_task import counts
from tests.support.workers import QUICK, SMALL, running_swarm, settings_of

BATCH = 4
STEPS = 160
SAMPLES = 1000  # two workers draw 1,280


def test_an_epoch_goes_on_after_a_kill_and_after_a_stop_of_all(tmp_path: Path) -> None:
    record, text = tmp_path / "record", tmp_path / "text"
    record.mkdir()
    trained = 32 * SAMPLES + 1
    text.write_bytes(bytes(n % 251 for n in range(trained * 10 // 9 + 1)))
    first, second = gates(tmp_path, 20, 45)
    settings = [*SMALL, *QUICK, *first.settings]
    settings += settings_of(
        task__name='"tests.support.leased_task:Recorded"',
        task__data='"leased"',
        task__record=f'"{record}"',
        task__text=f'"{text}"',
        task__batch_size=BATCH,
        run__steps=STEPS,
        diloco__inner_steps=10,
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
    assert sum(found) - SAMPLES <= 2 * BATCH  # as much as a crash may repeat
    assert any(counts(record, 1, SAMPLES))
