"""Time to a loss: what is multiplied, and what is said of a target not reached."""

from pathlib import Path

from tests.lab.time_to_loss import Answer, Options, Results, table

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


def test_the_table_says_what_was_not_reached(tmp_path: Path) -> None:
    found = results(tmp_path)
    answers = [Answer.of(name, OPTIONS, found) for name in OPTIONS.systems]
    lines = table(answers, OPTIONS, 1.5).splitlines()
    assert lines[0].startswith("target 1.500, which `ddp` reaches in 100 steps")
    assert lines[0].endswith("~: steps x seconds a step, no run")
    assert "| `torchft` | 1.400 | 200 | ~40 s (200 ms a step) | - |" in lines
    assert "| `local` | 1.800 | not in 300 | 50 ms a step | - |" in lines
