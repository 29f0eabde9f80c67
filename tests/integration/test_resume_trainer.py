"""A `transformers.Trainer` that is killed goes on with its swarm's state beside its own."""

import signal
from pathlib import Path

from tests.support.workers import WorkerProcess

PROGRAM = ("tests.support.resumed_trainer",)


def test_a_killed_trainer_goes_on_to_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """The checkpoint is between two rounds: anchor, momentum and position in the period count."""
    whole = WorkerProcess([str(tmp_path / "whole")], "whole", PROGRAM)
    killed = WorkerProcess([str(tmp_path / "out"), "--stop-at", "14"], "killed", PROGRAM)
    try:
        killed.wait_for(lambda e: e["event"] == "stopped", "step 14")
        killed.send(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        assert whole.wait() == 0, whole.errors
    finally:
        whole.end()
        killed.end()
    resumed = WorkerProcess([str(tmp_path / "out"), "--resume"], "resumed", PROGRAM)
    try:
        assert resumed.wait() == 0, resumed.errors
    finally:
        resumed.end()
    assert resumed.result == whole.result
    assert resumed.result["version"] == 5  # after 4, 8, 12, 16 and 18 steps
