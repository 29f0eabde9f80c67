"""From events to what is drawn."""

import json
from pathlib import Path

import numpy as np
import pytest

from algorithms.link import Link
from protos.events import Event
from tests.lab.compare.picture import Series, draw_link_use, read_events, series_of, smoothed


def worker(began_s: float, burst_bytes: int) -> list[Event]:
    """Trains for 2 s, waits 1 s while it sends, trains for 2 s; then it evaluates."""

    def progress(after_s: float, step: int, sent: int, loss: float) -> Event:
        time_s = began_s + after_s
        return {
            "event": "progress",
            "time_s": time_s,
            "step": step,
            "bytes_sent": sent,
            "loss": loss,
        }

    return [
        {"event": "progress", "state": "ready", "time_s": began_s - 1, "bytes_sent": 600},
        {"event": "started", "time_s": began_s, "step": 0},
        progress(0.1, 1, 1000, 6.0),
        progress(2.0, 20, 1000, 4.0),
        {"event": "round", "time_s": began_s + 3},
        progress(3.0, 20, 1000 + burst_bytes, 4.0),
        progress(5.0, 40, 1000 + burst_bytes, 2.0),
        progress(9.0, 40, 1000 + burst_bytes, 2.0) | {"state": "evaluating"},
    ]


def test_a_burst_stands_where_it_was_and_its_bytes_are_all_there() -> None:
    series = series_of([worker(5.0, 1_000_000), worker(7.5, 3_000_000)])
    assert series is not None
    assert series.time_s[-1] < 5  # what comes after the last step is no training
    during = (series.time_s > 2) & (series.time_s < 3)
    assert series.sent_mbps[during] == pytest.approx(16.0)  # 2 MB a second on average
    assert series.sent_mbps[~during] == pytest.approx(0.0)
    width_s = series.time_s[1] - series.time_s[0]
    assert series.sent_mbps.sum() * width_s == pytest.approx(16.0)
    assert series.loss[during] == pytest.approx(4.0)
    assert series.loss[-1] == pytest.approx(2.0, abs=0.2)


def test_workers_that_never_trained_are_left_out() -> None:
    ready: list[Event] = [{"event": "progress", "state": "ready", "time_s": 1.0, "bytes_sent": 1}]
    assert series_of([ready, []]) is None
    both = series_of([ready, worker(5.0, 1_000_000)])
    assert both is not None
    assert both.sent_mbps.max() == pytest.approx(8.0)


def test_events_cut_short_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    path.write_text(json.dumps({"event": "started"}) + '\n[1]\n{"event": "prog')
    assert read_events(path) == [{"event": "started"}]


def test_smoothing_keeps_the_ends_and_the_length() -> None:
    values = np.array([0.0, 10.0, 0.0, 10.0, 5.0])
    assert smoothed(values, 1) == pytest.approx([0.0, 10 / 3, 20 / 3, 5.0, 5.0])
    assert smoothed(values, 0) == pytest.approx(values)


def series(seconds: float) -> Series:
    times = np.arange(0.25, seconds, 0.5)
    return Series(times, 6 / (1 + times), np.full_like(times, 3.0))


@pytest.mark.parametrize("names", [("ddp", "diloco", "streaming"), ("diloco",), ("ddp",)])
def test_the_picture_takes_what_there_is(names: tuple[str, ...], tmp_path: Path) -> None:
    lengths = {"ddp": 300.0, "diloco": 20.0, "streaming": 12.0}
    path = tmp_path / "bench.png"
    runs = {name: series(lengths[name]) for name in names}
    draw_link_use(path, runs, Link(rate_mbps=20), {"ddp": 300.0})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of ddp"):
        draw_link_use(tmp_path / "x.png", {}, Link(rate_mbps=20), {})
