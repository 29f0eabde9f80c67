"""Trackers are told the figures of events: TensorBoard itself, and stand-ins for the others."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from murmuration.worker.views.tracking import Trackers, figures_of

PROGRESS = {
    "event": "progress", "state": "training", "step": 40, "steps": 100, "loss": 2.5,
    "learning_rate": 0.003, "gradient_norm": 0.75, "tokens": 2560, "tokens_per_s": 512.0,
    "rounds": 2, "bytes_sent": 1000, "bytes_received": 900, "samples": None,
}  # fmt: skip
ROUND = {"event": "round", "round": 2, "exchange_s": 0.5, "stall_s": 0.25, "peer": "w0"}
VALIDATION = {"event": "validation", "step": 60, "val_loss": 2.25}
VALIDATION["val_metrics"] = {"accuracy": 0.5, "note": "text"}
EVENTS = (PROGRESS, ROUND, VALIDATION, {"event": "started", "step": 0, "group": ["w0"]})
FIGURES = {
    ("train/loss", 40, 2.5), ("train/learning_rate", 40, 0.003), ("train/gradient_norm", 40, 0.75),
    ("train/tokens", 40, 2560), ("speed/tokens_per_s", 40, 512), ("rounds/completed", 40, 2),
    ("traffic/bytes_sent", 40, 1000), ("traffic/bytes_received", 40, 900),
    ("rounds/exchange_s", 40, 0.5), ("rounds/stall_s", 40, 0.25), ("validation/loss", 60, 2.25),
    ("validation/accuracy", 60, 0.5),
}  # fmt: skip


def tell(names: tuple[str, ...], out: Path) -> list[dict[str, Any]]:
    """Returns what was passed on."""
    passed: list[dict[str, Any]] = []
    trackers = Trackers(names, out, "w0", passed.append)
    for event in EVENTS:
        trackers(dict(event))
    trackers.close()
    return passed


class StandIn(ModuleType):
    """The common part of `wandb` and `trackio`."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__(name)
        self.began: dict[str, Any] = {}
        self.told: set[tuple[str, int, float]] = set()
        self.finished, self.fails, self.calls = False, fails, 0

    def init(self, **options: Any) -> None:
        self.began = options

    def log(self, figures: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("no way out")
        self.told |= {(name, step, value) for name, value in figures.items()}

    def finish(self) -> None:
        self.finished = True


def test_tensorboard_has_every_figure_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert tell(("tensorboard",), tmp_path) == list(EVENTS)
    found = EventAccumulator(str(tmp_path / "tensorboard" / "w0")).Reload()
    told = {name: found.Scalars(name) for name in found.Tags()["scalars"]}
    assert {(name, each.step) for name, (each,) in told.items()} == {f[:2] for f in FIGURES}
    for name, _, value in FIGURES:
        assert told[name][0].value == pytest.approx(value)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_others_are_told_the_same(name, tmp_path, monkeypatch):
    library = StandIn(name)
    monkeypatch.setitem(sys.modules, name, library)
    tell((name, name), tmp_path)
    assert library.told == FIGURES
    assert library.finished
    assert (library.began["project"], library.began["name"]) == ("murmuration", "w0")
    assert library.began.get("dir") == (str(tmp_path) if name == "wandb" else None)


def test_a_tracker_that_fails_is_told_of_once_and_holds_nothing_up(tmp_path, monkeypatch):
    bad, good = StandIn("wandb", fails=True), StandIn("trackio")
    monkeypatch.setitem(sys.modules, "wandb", bad)
    monkeypatch.setitem(sys.modules, "trackio", good)
    passed = tell(("wandb", "trackio"), tmp_path)
    warnings = [event["text"] for event in passed if event["event"] == "warning"]
    assert len(warnings) == 1
    assert "no way out" in warnings[0]
    assert (bad.calls, good.told) == (1, FIGURES)


def test_what_is_no_number_and_what_is_no_training_is_left_out():
    assert figures_of({**PROGRESS, "state": "waiting"}) == {}
    assert figures_of({"event": "progress", "state": "training", "loss": float("nan")}) == {}
    assert figures_of({"event": "validation", "val_loss": None, "val_metrics": 3}) == {}
