import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.rendezvous.records import Record
from coordinator.report.printer import figure_lines, print_report, sparkline
from coordinator.report.report import build_report, mean_curve, write_report
from coordinator.report.results import draw_loss_curve, leave_results, smoothed, thinned

KEYS = [
    "preset",
    "workers",
    "steps",
    "inner_steps",
    "seed",
    "params",
    "val_loss",
    "train_loss_curve",
    "wall_s",
    "compute_s",
    "stall_s",
    "compute_utilization",
    "rounds_completed",
    "rounds_failed",
    "peers",
]
PEER_KEYS = [
    "peer",
    "steps",
    "bytes_sent",
    "bytes_received",
    "payload_bytes_sent",
    "anchor_hash",
    "momentum_hash",
    "exit_code",
]


def finished(event: dict[str, object]) -> Record:
    record = Record(str(event["peer"]))
    record.apply({"event": "progress", "step": 90, "steps": 100, "state": "training"}, 0.0)
    record.apply(event, 1.0)
    record.apply({"event": "exit", "exit_code": 0}, 1.0)
    return record


def killed(peer: str) -> Record:
    record = Record(peer)
    for step, loss in ((10, 4.0), (40, 3.0)):
        record.apply(
            {
                "event": "progress",
                "step": step,
                "steps": 100,
                "loss": loss,
                "bytes_sent": 700_000,
                "bytes_received": 600_000,
                "state": "training",
            },
            0.0,
        )
    record.apply({"event": "round", "fragment": 0, "round": 0}, 0.0)
    record.apply({"event": "round_failed", "fragment": 0, "round": 1}, 0.0)
    record.apply({"event": "exit", "exit_code": -9}, 0.0)
    return record


def printed(report: dict[str, object], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_means_are_over_the_workers_that_reported(result_event) -> None:
    records = [
        finished(result_event("w0", compute_s=8.0, compute_utilization=0.8)),
        finished(result_event("w1", compute_s=6.0, compute_utilization=0.6, bytes_sent=4_000_000)),
        killed("w2"),
    ]
    report = build_report(records, settings={}, elapsed_s=12.0)
    assert not [key for key in KEYS if key not in report]
    assert not [key for key in PEER_KEYS if any(key not in peer for peer in report["peers"])]
    assert report["compute_s"] == pytest.approx(7.0)
    assert report["compute_utilization"] == pytest.approx(0.7)
    assert report["bytes_sent_per_worker"] == 3_000_000
    assert report["bytes_ratio"] == pytest.approx(100 / 3)
    assert (report["steps"], report["step"], report["workers"]) == (100, 100, 3)
    assert (report["rounds_completed"], report["rounds_failed"]) == (4, 1)
    assert (report["seed"], report["preset"], report["inner_steps"]) == (0, "diloco", 25)
    assert report["hashes_agree"] is True
    assert report["reason"] == "finished"


def test_step_times_count_by_the_steps_that_they_are_of(result_event) -> None:
    told = [
        {"steps": 100, "steps_in_flight": 10, "step_s_idle": 0.05, "step_s_in_flight": 0.09},
        {"steps": 100, "steps_in_flight": 90, "step_s_idle": 0.06, "step_s_in_flight": 0.06},
    ]
    records = [finished(result_event(f"w{at}", **steps)) for at, steps in enumerate(told)]
    report = build_report(records, settings={}, elapsed_s=1.0)
    assert report["step_s_idle"] == pytest.approx((90 * 0.05 + 10 * 0.06) / 100)
    assert report["step_s_in_flight"] == pytest.approx((10 * 0.09 + 90 * 0.06) / 100)
    assert "51.0 ms; 63.0 ms while a round is in flight" in printed(report)


def test_a_dead_worker_stands_with_its_last_numbers(result_event) -> None:
    report = build_report([finished(result_event("w0")), killed("w1")], settings={}, elapsed_s=1.0)
    dead = report["peers"][1]
    assert dead["exit_code"] == -9
    assert (dead["steps"], dead["bytes_sent"], dead["rounds_completed"]) == (40, 700_000, 1)
    assert (dead["anchor_hash"], dead["val_loss"], dead["compute_s"]) == (None, None, None)
    assert report["hashes_agree"] is None  # one alone has nobody to agree with
    text = printed(report)
    assert "killed (SIGKILL)" in text
    assert "nothing to compare: 1 worker reported" in text


def test_when_all_have_died_the_report_still_stands() -> None:
    report = build_report(
        [killed("w0"), killed("w1")],
        settings={"preset": "ddp", "steps": 100, "inner_steps": 1, "seed": 7},
        elapsed_s=1.0,
    )
    assert (report["preset"], report["seed"], report["val_loss"]) == ("ddp", 7, None)
    assert report["train_loss_curve"] == [(10, 4.0), (40, 3.0)]
    text = printed(report)
    assert "not measured" in text
    assert "40 of 100 inner steps" in text


def test_differing_hashes_are_not_hidden(result_event) -> None:
    records = [finished(result_event("w0")), finished(result_event("w1", momentum_hash="cc"))]
    report = build_report(records, settings={}, elapsed_s=1.0)
    assert report["hashes_agree"] is False
    assert "DIFFER" in printed(report)
    assert "DIFFER" not in printed({**report, "preset": "local"})


def test_lost_steps_are_added_up_and_named(result_event) -> None:
    records = [finished(result_event("w0", steps_lost=5)), finished(result_event("w1"))]
    report = build_report(records, settings={}, elapsed_s=1.0)
    assert [report["steps_lost"], *(peer["steps_lost"] for peer in report["peers"])] == [5, 5, 0]
    assert "none failed; 5 inner steps lost, since values were not finite" in printed(report)


def test_the_printed_report_names_the_figures(result_event) -> None:
    records = [
        finished(result_event(f"w{i}", sample="def f():\n\treturn \x1b[2J1\n")) for i in range(4)
    ]
    report = build_report(records, settings={}, elapsed_s=1.0)
    text = printed({**report, "loss_png": "out/loss.png", "out": "out/report.json"})
    for expected in (
        "diloco · 4 workers · 100 inner steps · a round every 25 steps · 1.5 million parameters",
        "2.000 nats per byte (perplexity 7.39, 2.89 bits per byte)",
        "2.0 MB per worker; DDP in fp32 would have sent 100.0 MB, 50 times as much; in bf16 25",
        "80.0 % of the 10 s from first to last inner step; 1.0 s stalled on average",
        "4 completed, none failed",
        "all 4 that reported hold identical anchors and momenta, bit for bit",
        "p50 0.2 ms, p99 2.0 ms, max 5.0 ms",
        "  | def f():",
        "loss curve  out/loss.png",
        "report      out/report.json",
    ):
        assert expected in text
    assert "\x1b" not in text


def test_a_narrow_terminal_shows_each_workers_row_whole(result_event) -> None:
    report = build_report([finished(result_event("worker-of-lab-3"))], settings={}, elapsed_s=1.0)
    (row,) = [
        line.split()
        for line in printed(report, 80).splitlines()
        if line.split()[:1] == ["worker-of-lab-3"]
    ]
    assert row[-1] == "done"
    assert not any("…" in word for word in row)


def test_probes_stand_apart_and_small_words_are_explained(result_event) -> None:
    plain = dict(
        figure_lines(build_report([finished(result_event("w0"))], settings={}, elapsed_s=1.0))
    )
    assert not {"probes", "final mean"} & plain.keys()
    told = result_event(
        "w0",
        probe_bytes_received=1_900_000,
        probe_bytes_sent=3,
        fragments=3,
        final_mean_bytes=1.5e6,
        final_mean_stall_s=1.25,
        final_mean_rounds=3,
        rounds_completed=9,
        traffic={
            "contributions": {"values": 8e6, "encoded_bytes": 2e6, "payload_bytes": 1e6},
            "final_mean": {"values": 4e5, "encoded_bytes": 1.6e6, "payload_bytes": 1.5e6},
        },
        val_loss=1.25824,
        val_loss_error=0.0468,
    )
    lines = dict(figure_lines(build_report([finished(told)], settings={}, elapsed_s=1.0)))
    assert lines["bytes sent"] == plain["bytes sent"]
    assert lines["probes"].startswith("1.9 MB received and 0.0 MB sent, not counted above")
    assert lines["rounds"] == (
        "9 completed (3 of the final mean), none failed; "
        "each exchanges one of 3 fragments of the model"
    )
    assert lines["final mean"] == (
        "exact, in fp32, of all replicas: 1.5 MB of these bytes, 30.00 bits per value; "
        "1.2 s of the stall below"
    )
    assert lines["bits per value"] == "1.00 in contributions (2.00 before zstd)"
    assert lines["validation loss"].startswith("1.258 ± 0.047 nats per byte (perplexity 3.52")


def test_the_mean_curve_uses_who_has_the_step() -> None:
    assert mean_curve([[(1, 4.0), (2, 2.0)], [(1, 2.0)], []]) == [(1, 3.0), (2, 2.0)]
    assert mean_curve([]) == []


def test_what_a_task_measures_is_a_mean_over_those_that_did(result_event) -> None:
    found = [{"accuracy": 0.5, "recall": 0.25}, {"accuracy": 0.75, "recall": math.nan}, None]
    events = [result_event(f"w{n}", val_metrics=each) for n, each in enumerate(found)]
    report = build_report([finished(event) for event in events], settings={}, elapsed_s=1.0)
    assert report["val_metrics"] == {"accuracy": 0.625, "recall": 0.25}
    (line,) = (value for label, value in figure_lines(report) if label == "validation loss")
    assert line.endswith("bits per byte), accuracy 0.625, recall 0.25")


def test_numbers_that_json_cannot_hold_become_null(tmp_path: Path, result_event) -> None:
    event = result_event(
        "w0", val_loss=math.nan, compute_s=math.inf, train_loss_curve=[[1, math.nan], [2, 1.0]]
    )
    report = build_report([finished(event)], settings={}, elapsed_s=1.0)
    write_report(report, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert (read["val_loss"], read["compute_s"]) == (None, None)
    assert read["train_loss_curve"] == [[2, 1.0]]


def test_leaves_json_picture_and_a_copy(tmp_path: Path, result_event) -> None:
    console = Console(file=io.StringIO(), width=120)
    report = leave_results(
        [finished(result_event("w0")), killed("w1")],
        tmp_path,
        console,
        settings={},
        elapsed_s=2.0,
        json_path=tmp_path / "deep" / "copy.json",
    )
    assert report["loss_png"] == str(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    first, copy = (tmp_path / "report.json").read_text(), (tmp_path / "deep/copy.json").read_text()
    assert first == copy
    assert json.loads(first)["peers"][1]["exit_code"] == -9


def test_a_folder_that_cannot_be_written_is_said_and_survived(tmp_path: Path, result_event) -> None:
    (tmp_path / "file").write_text("in the way")
    console = Console(file=io.StringIO(), width=120)
    report = leave_results(
        [finished(result_event("w0"))], tmp_path / "file", console, settings={}, elapsed_s=2.0
    )
    assert report["val_loss"] == 2.0
    assert isinstance(console.file, io.StringIO)
    assert "could not be written" in console.file.getvalue()


def test_the_validation_loss_on_the_way_is_reported_printed_and_drawn(
    tmp_path: Path, result_event
) -> None:
    curves = ([[20, 4.0], [40, 2.0]], [[20, 5.0]])
    records = [
        finished(result_event(f"w{i}", val_loss_curve=curve)) for i, curve in enumerate(curves)
    ]
    report = build_report(records, settings={}, elapsed_s=1.0)
    assert report["val_loss_curve"] == [(20, 4.5), (40, 2.0)]
    (line,) = [line.split() for line in printed(report).splitlines() if "on the way" in line]
    assert (line[3], line[-1]) == ("4.50", "2.00")
    without, drawn = tmp_path / "without.png", tmp_path / "with.png"
    draw_loss_curve(without, {}, [], 2.0, "run")
    draw_loss_curve(drawn, {}, [], 2.0, "run", val_curve=report["val_loss_curve"])
    assert drawn.read_bytes() != without.read_bytes()


def test_an_empty_run_can_be_drawn(tmp_path: Path) -> None:
    draw_loss_curve(tmp_path / "empty.png", {}, [], None, "nothing")
    assert (tmp_path / "empty.png").exists()


def test_smoothing_keeps_a_line_a_line_and_both_ends() -> None:
    line = [(i, float(i)) for i in range(1000)]
    assert [loss for _, loss in smoothed(line)] == pytest.approx([loss for _, loss in line])
    noisy = [(i, float(i % 2)) for i in range(1000)]
    middle = [loss for _, loss in smoothed(noisy)][100:900]
    assert all(abs(loss - 0.5) < 0.06 for loss in middle)
    assert smoothed([]) == []


def test_thinning_keeps_the_last_point() -> None:
    curve = [(i, 1.0) for i in range(9_999)]
    assert len(thinned(curve)) <= 2001
    assert thinned(curve)[-1] == curve[-1]
    assert thinned(curve[:10]) == curve[:10]


def test_the_sparkline_falls() -> None:
    line = sparkline([(i, 5.0 / (i + 1)) for i in range(200)])
    assert (line[0], line[-1], len(line)) == ("█", "▁", 40)
    assert sparkline([(1, 2.0)]) == "▁"


@pytest.mark.parametrize(
    ("unit", "shown"),
    [
        (None, "2.000"),
        ("mean squared error", "2.000 mean squared error"),
        ("nats per token", "2.000 nats per token (perplexity 7.39)"),
    ],
)
def test_a_loss_is_shown_in_the_tasks_own_unit(result_event, unit, shown) -> None:
    records = [finished(result_event("w0", loss_unit=unit))]
    text = printed(build_report(records, settings={}, elapsed_s=1.0))
    (line,) = [line.strip() for line in text.splitlines() if "validation loss" in line]
    assert line.removeprefix("validation loss").strip() == shown
