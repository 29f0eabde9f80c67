"""Checkpoints beside training: how often, what is told, and files that the library reads."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from murmuration.worker.config import CheckpointConfig
from murmuration.worker.training import checkpoint, saving
from murmuration.worker.training.checkpoint import write_tensors
from murmuration.worker.training.saving import SHARE, Saver


class Case:
    """A saver whose checkpoints cost what the test says: (copying, writing) in seconds."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, every_s: float, costs: tuple[float, float]
    ) -> None:
        self.now_s = self.busy_s = 0.0  # of the train thread, and of the thread that saves
        monkeypatch.setattr(saving.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(saving.time, "thread_time", lambda: self.busy_s)
        self.costs = costs
        self.told: list[dict[str, object]] = []
        self.steps: list[int] = []
        self.fails: Exception | None = None
        monkeypatch.setattr(checkpoint, "save", self._save)
        config = CheckpointConfig(every_s=every_s)
        self.saver = Saver(Path("out"), config, 0, self.told.append, lambda _: None)

    def _snapshot(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        self.now_s += self.costs[0]
        if isinstance(self.fails, MemoryError):
            self.steps.append(0)
            raise self.fails
        return {}, {}

    def _save(self, _folder: Path, step: int, *_: object) -> Path:
        self.busy_s += self.costs[1]
        self.steps.append(step)
        if self.fails:
            raise self.fails
        return Path(f"step-{step}")

    def train(self, seconds: int) -> None:
        for second in range(seconds):
            self.now_s += 1.0
            self.saver.save_if_due(second, self._snapshot)
            if self.saver._saving is not None:
                self.saver._saving.result()

    def warnings(self) -> list[str]:
        return [str(event["text"]) for event in self.told if event["event"] == "warning"]


@pytest.mark.parametrize("every_s", [0.001, 1.0, 5.0, 30.0, 1000.0])
@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.9), (0.3, 1.5), (4.0, 4.0)])
def test_checkpoints_take_three_percent_whatever_is_asked(monkeypatch, every_s, costs):
    case = Case(monkeypatch, every_s, costs)
    case.train(3000)
    least_s = max(every_s, sum(costs) / SHARE)
    assert len(case.steps) <= 3000 / least_s + 2
    assert len(case.steps) >= 3000 / (least_s + costs[0] + 1.0) - 1
    assert len(case.warnings()) == (sum(costs) / SHARE > max(3 * every_s, 5.0))


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (OSError(28, "No space"), "[Errno 28] No space"),
        (KeyError("dtype"), "KeyError: 'dtype'"),
        (MemoryError("no room"), "MemoryError: no room"),
    ],
)
def test_one_that_fails_is_told_once_and_tried_again(monkeypatch, fails, says):
    """A full disk, what no file can hold, or no memory for a copy."""
    case = Case(monkeypatch, 10.0, (0.0, 0.0))
    case.fails = fails
    case.train(35)
    assert len(case.steps) == 3
    assert case.warnings() == [f"no checkpoint at step 9: {says}; training goes on"]
    assert case.saver.failed
    case.fails = None
    case.train(10)
    assert not case.saver.failed


def test_the_first_waits_as_long_as_its_size_lets_expect():
    config = CheckpointConfig(every_s=30.0)
    for expected_bytes, waits_s in ((3_000_000_000, 100.0), (10**6, 30.0)):
        saver = Saver(Path("out"), config, expected_bytes, lambda _: None, lambda _: None)
        assert saver.interval_s == waits_s


def test_only_one_is_on_its_way(monkeypatch, tmp_path):
    goes_on, begun = threading.Event(), []

    def slow(*_: object) -> Path:
        begun.append(1)
        goes_on.wait()
        return tmp_path

    monkeypatch.setattr(checkpoint, "save", slow)
    saver = Saver(tmp_path, CheckpointConfig(every_s=1e-9), 0, lambda _: None, lambda _: None)
    for step in range(5):
        saver.save_if_due(step, lambda: ({}, {}))
    goes_on.set()
    saver.close()
    assert len(begun) == 1


KINDS = "float64 float32 float16 bfloat16 bool complex64 int64 int32 int16 int8 uint8 float8_e4m3fn"


def test_the_library_reads_what_is_written_in_pieces(tmp_path):
    drawn = torch.randn(700, 700, generator=torch.Generator().manual_seed(0))  # of two pieces
    tensors = {kind: (drawn * 9).to(getattr(torch, kind)) for kind in KINDS.split()}
    tensors |= {"scalar": torch.tensor(3), "none": torch.empty(0, 4), "turned": drawn.t()}
    written = write_tensors(tmp_path / "x.safetensors", tensors)
    assert written["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        assert (read[name].dtype, read[name].shape) == (values.dtype, values.shape)
        raw = [each.reshape(-1).view(torch.uint8) for each in (read[name], values)]
        assert torch.equal(*raw), name
