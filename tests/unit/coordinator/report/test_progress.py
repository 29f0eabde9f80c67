import io

from rich.console import Console

from coordinator.rendezvous.records import Record
from coordinator.report.progress import (
    LiveProgress,
    PlainProgress,
    progress_for,
    progress_table,
    summary,
)


def records() -> list[Record]:
    made = []
    for index in range(2):
        record = Record(f"w{index}")
        record.apply(
            {
                "event": "progress",
                "step": 240 + index,
                "steps": 1200,
                "loss": 2.3 + index / 50,
                "rounds": 9,
                "bytes_sent": 33_000_000,
                "bytes_received": 32_000_000,
                "state": "training",
            },
            12.0,
        )
        made.append(record)
    return made


def test_a_plain_line_sums_it_up() -> None:
    line = "step 240/1200  loss 2.31  rounds 9  sent 33.0 MB each  [2 training]"
    assert summary(records(), 12.0) == line


def test_the_dead_do_not_hold_back_the_step() -> None:
    both = records()
    both[0].apply({"event": "exit", "exit_code": -9}, 12.0)
    assert summary(both, 12.0).startswith("step 241/1200  loss 2.32")
    assert summary(both, 12.0).endswith("[1 killed (SIGKILL), 1 training]")


def test_before_the_start() -> None:
    assert summary([Record("w0"), Record("w1")], 1.0) == "starting  [2 starting]"
    ready = Record("w0")
    ready.apply({"event": "progress", "state": "ready"}, 1.0)
    ready.apply({"event": "started", "step": 0}, 1.0)  # nothing has told how many steps there are
    assert summary([ready], 1.0) == "starting  [1 ready]"


def test_plain_lines_come_every_two_seconds() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, 100.0)
    training = records()
    for tenth in range(50):
        for record in training:
            record.step += 1
        progress.update(training, 100.0 + tenth / 10)
    progress.note("w1 has ended", 104.9)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["0.0 s", "2.0 s", "4.0 s", "4.9 s"]
    assert lines[-1] == "4.9 s  w1 has ended"


def test_what_has_not_changed_is_not_said_again() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, 0.0)
    both = records()
    for second in range(60):
        if second == 20:
            for record in both:
                record.apply({"event": "progress", "step": 1200, "state": "settling"}, 20.0)
        if second == 30:
            both[0].apply({"event": "progress", "step": 1200, "state": "evaluating"}, 30.0)
        for record in both if second < 20 else ():
            record.heard_s = second
        progress.update(both, float(second))
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "0.0 s",
        "20.0 s",
        "30.0 s",
    ]
    assert stream.getvalue().endswith("[1 evaluating, 1 settling]\n")


def test_a_terminal_gets_a_table_and_keeps_the_notes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})
    progress = progress_for(console, 0.0)
    assert isinstance(progress, LiveProgress)
    progress.update(records(), 12.0)
    progress.note("[not markup]", 12.1)
    progress.close(records(), 12.2)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for expected in ("240/1200", "2.320", "33.0 MB", "training", "[not markup]"):
        assert expected in text


def test_elsewhere_plain_lines() -> None:
    assert isinstance(progress_for(Console(file=io.StringIO()), 0.0), PlainProgress)


def test_the_table_has_a_column_for_stages_when_the_model_is_cut() -> None:
    def header(cut: bool) -> list[str]:
        shown = records()
        if cut:
            shown[1].apply({"event": "progress", "step": 241, "stage": 1}, 12.0)
        return [str(column.header) for column in progress_table(shown, 12.0, 0.0).columns]

    assert header(cut=True)[:3] == ["worker", "stage", "step"]
    assert "stage" not in header(cut=False)
