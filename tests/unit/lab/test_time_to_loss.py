"""Time to a loss: what is run again, what is multiplied, and what of a target not reached."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab import time_to_loss
from tests.lab.compare.options import Bench
from tests.lab.compare.tables import Row, problem_row
from tests.lab.time_to_loss import Answer, Options, Results, draw, learn, table, time_link

OPTIONS = Options(
    links=("2mbit", "1gbit"),
    systems=("ddp", "diloco", "torchft", "local"),
    steps=100,
    most_steps=300,
    pace_steps=10,
    workers=4,
    seed=0,
    settings=(),
)
CURVES = {
    "ddp": [(50, 2.0), (100, 1.5)],
    "diloco": [(100, 1.9), (200, 1.5), (300, 1.4)],
    "local": [(100, 2.0), (300, 1.8)],
}


def results(folder: Path) -> Results:
    found = Results(folder / "results.jsonl")
    for name, curve in CURVES.items():
        found.add_curve(OPTIONS.curve_key(name), curve)
    for name, pace_s in (("ddp", 2.0), ("diloco", 0.1), ("torchft", 0.2), ("local", 0.05)):
        found.add_pace(OPTIONS.pace_key(name, "2mbit"), pace_s)
    return found


def test_steps_to_the_target_times_seconds_a_step(tmp_path: Path) -> None:
    found = results(tmp_path)
    took = {name: Answer.of(name, OPTIONS, found).seconds_on("2mbit") for name in OPTIONS.systems}
    assert took == {"ddp": 200.0, "diloco": 20.0, "torchft": 40.0, "local": None}
    assert Answer.of("ddp", OPTIONS, found).seconds_on("1gbit") is None  # not measured


def test_the_table_and_the_picture_say_what_was_not_reached(tmp_path: Path) -> None:
    found = results(tmp_path)
    answers = [Answer.of(name, OPTIONS, found) for name in OPTIONS.systems]
    lines = table(answers, OPTIONS, 1.5).splitlines()
    assert lines[0].startswith("target 1.500, which `ddp` reaches in 100 steps")
    assert lines[0].endswith("~: steps x seconds a step, no run")
    assert "| `torchft` | 1.400 | 200 | ~40 s (200 ms a step) | - |" in lines
    assert "| `local` | 1.800 | not in 300 | 50 ms a step | - |" in lines
    path = tmp_path / "runs" / "picture.png"
    draw(path, answers, OPTIONS)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_is_in_the_file_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def run_swarm(*args: str) -> dict[str, Any]:
        asked.append(args)
        return {"val_loss_curve": [[60, 2.5]], "val_loss": 2.25}

    monkeypatch.setattr(time_to_loss, "run_swarm", run_swarm)
    learn(OPTIONS, Results(tmp_path / "results.jsonl"))
    assert [args[1] for args in asked] == ["ddp", "diloco", "local"]  # torchft's are diloco's
    assert [args[args.index("--steps") + 1] for args in asked] == ["100", "300", "300"]
    again = Results(tmp_path / "results.jsonl")
    learn(OPTIONS, again)
    assert len(asked) == 3
    assert again.curves[OPTIONS.curve_key("local")] == [(60, 2.5), (300, 2.25)]


def test_a_system_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_swarm(*args: str) -> dict[str, Any]:
        if "local" in args:
            raise SystemExit("murmur swarm exited with 1")
        return {"val_loss_curve": [[60, 2.5]], "val_loss": 2.25}

    class PartlyFailing:
        def __init__(
            self, bench: Bench, interrupts: object, say: object, done: Callable[[Row], None]
        ) -> None:
            assert "local" not in bench.presets  # it has no losses
            self._bench, self._done = bench, done

        def run(self) -> int:
            for name in self._bench.presets:
                self._done(Row(name=name, asked_steps=10, wall_s=5.0))
            kept = Results(tmp_path / "results.jsonl").paces
            assert len(kept) == 2  # each at its end
            self._done(problem_row("torchft", 10, "no namespaces", failed=True))
            return 1

    monkeypatch.setattr(time_to_loss, "run_swarm", run_swarm)
    monkeypatch.setattr(time_to_loss, "Session", PartlyFailing)
    found = Results(tmp_path / "results.jsonl")
    learn(OPTIONS, found)
    time_link(OPTIONS, "2mbit", found)
    answers = [Answer.of(name, OPTIONS, found) for name in OPTIONS.systems]
    lines = table(answers, OPTIONS, 2.25).splitlines()
    assert "| `diloco` | 2.250 | 300 | ~150 s (500 ms a step) | - |" in lines
    assert "| `local` | failed | - | - | - |" in lines
    assert lines[-2:] == [
        "- `torchft`, 2mbit: no namespaces",
        "- `local`, its losses: murmur swarm exited with 1",
    ]
    draw(tmp_path / "picture.png", answers, OPTIONS)
