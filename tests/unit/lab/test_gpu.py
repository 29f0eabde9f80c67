"""Checks on a card: one that fails is told, the rest goes on, and a later call goes on there."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.lab import gpu

CPU = torch.device("cpu")


def failing(at: gpu.Place) -> gpu.Figures:
    raise RuntimeError("no kernel\nand much more")


def absent(at: gpu.Place) -> gpu.Figures:
    raise gpu.Skipped("of CUDA")


def test_a_check_that_fails_is_a_line_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known: dict[str, gpu.Check] = {
        "bad": failing,
        "slow": lambda at: {"ms": 3.0, "missed": "at most 2 ms"},
        "absent": absent,
        "good": lambda at: {"far": 0.25},
    }
    monkeypatch.setattr(gpu, "checks", lambda small: known)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    results = gpu.Results(tmp_path / "gpu.json", CPU)
    gpu.run_checks(list(known), CPU, results)
    ends = {name: figures["result"] for name, figures in results.found.items()}
    assert ends == {"bad": "failed", "slow": "missed", "absent": "skipped", "good": "passed"}
    assert results.found["bad"]["error"] == "RuntimeError: no kernel"
    assert "ms 3, missed at most 2 ms" in capsys.readouterr().out
    results.forget_failed(list(known))
    assert list(results.found) == ["slow", "absent", "good"]
    whole = json.loads((tmp_path / "gpu.json").read_text())
    assert whole[f"cpu, torch {torch.__version__}"]["good"]["far"] == 0.25


@pytest.mark.parametrize(("minutes", "left"), [(5.0, []), (0.0, ["codecs", "stages"])])
def test_a_process_that_dies_fails_one_check_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, left: list[str]
) -> None:
    monkeypatch.setattr(gpu, "_PROGRAM", (sys.executable, "-Sc", "import os; os.abort()"))
    results = gpu.Results(tmp_path / "gpu.json", CPU)
    options = argparse.Namespace(minutes=minutes, device="cpu", results=tmp_path / "gpu.json")
    assert gpu.supervise(["codecs", "stages"], options, results) == left
    errors = [figures["error"] for figures in results.found.values()]
    assert errors == ([] if left else ["exit code -6"] * 2)
