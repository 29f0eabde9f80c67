"""A worker that is to go on from a checkpoint of another stage says so in one line, and one that
is ended as it moves to another stage does."""

import signal

import pytest

from murmuration.worker.config import load_config, task_of
from murmuration.worker.daemon import Worker, WorkerOptions, run_worker
from murmuration.worker.errors import CheckpointError
from murmuration.worker.manifest import Manifest
from murmuration.worker.node.node import NodeConfig
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.training import checkpoint
from murmuration.worker.training.outer_state import FORMAT

SETTINGS = (
    "stages.count=3",
    "task.architecture={hidden_size=16, intermediate_size=24, num_hidden_layers=3, "
    "num_attention_heads=2, num_key_value_heads=2}",
    f'task.text="{__file__}"',
)
CONFIG = load_config(None, SETTINGS, None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_worker_that_is_ended_as_it_moves_ends(tmp_path, monkeypatch, number, code):
    def moves(worker: Worker, _aside: object) -> int:
        worker.goes_on = options
        with worker._signals():
            signal.raise_signal(number)
        monkeypatch.undo()  # another one would train
        return 0

    node = NodeConfig(peer="w", stage=1)
    options = WorkerOptions(node=node, out=tmp_path, resume=False, announce=lambda _: None)
    monkeypatch.setattr(Worker, "_run", moves)
    assert run_worker(CONFIG, options) == code


def test_a_checkpoint_of_another_stage_is_refused(tmp_path):
    manifest = Manifest.of(CONFIG, part_of(task_of(CONFIG), CONFIG, 0).whole)
    values = {"manifest": manifest.plain(), "stage": 2, "step": 5, "format": FORMAT}
    saved = checkpoint.save(tmp_path / "checkpoints", 5, {}, values)
    node, given = NodeConfig(peer="w", stage=1), {"resume": True, "announce": lambda _: None}
    says = "is of stage 2, this worker serves stage 1; resume with --stage 2 or another --out"
    with pytest.raises(CheckpointError, match=f"^{saved} {says}$"):
        run_worker(CONFIG, WorkerOptions(node=node, out=tmp_path, **given))
