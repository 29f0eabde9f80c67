import math

import pytest

from coordinator.rendezvous.records import Record, curve_of, exit_words, printable
from coordinator.report.notes import Notes


def progress(step: int, **changes: object) -> dict[str, object]:
    return {
        "event": "progress",
        "step": step,
        "steps": 100,
        "loss": 2.0,
        "round": 3,
        "bytes_sent": 10,
        "bytes_received": 20,
        "state": "training",
        **changes,
    }


def test_progress_replaces_and_the_curve_grows() -> None:
    record = Record("w0")
    record.apply({"event": "listening", "address": "h:1", "pid": 3}, 0.0)
    for step, loss in ((10, 3.0), (10, 3.0), (20, 2.5), (30, math.nan)):
        record.apply(progress(step, loss=loss), 1.0)
    assert (record.address, record.step, record.loss) == ("h:1", 30, None)
    assert record.loss_curve() == [(10, 3.0), (20, 2.5)]


def test_the_curve_is_bounded_and_keeps_its_start() -> None:
    record = Record("w0")
    for step in range(20_000):
        record.apply(progress(step), 0.0)
    assert len(record.curve) <= 4096
    assert record.curve[0][0] == 0
    assert record.curve[-1][0] > 19_000


def test_a_repeated_round_counts_once() -> None:
    record = Record("w0")
    for round_ in (1, 2, 2, 1, 3):
        record.apply({"event": "round", "fragment": 0, "round": round_}, 0.0)
    record.apply({"event": "round", "fragment": 1, "round": 1}, 0.0)
    record.apply({"event": "round_failed", "fragment": 0, "round": 4}, 0.0)
    assert (record.rounds_completed, record.rounds_failed) == (4, 1)


def test_the_result_wins_over_what_was_seen(result_event) -> None:
    record = Record("w0")
    record.apply(progress(90), 0.0)
    record.apply({"event": "round", "fragment": 0, "round": 9}, 0.0)
    record.apply(result_event("w0"), 1.0)
    assert (record.step, record.bytes_sent, record.rounds_completed) == (100, 2_000_000, 4)
    assert record.loss_curve() == [(50, 3.0), (100, 2.5)]
    assert record.shown_state(1e9) == "done"


def test_values_of_a_wrong_type_are_passed_over() -> None:
    record = Record("w0")
    record.apply(progress(10), 0.0)
    record.apply({"event": ["what"]}, 0.0)
    record.apply({"event": "progress", "step": "x", "loss": "y", "state": 3, "round": None}, 0.0)
    record.apply({"event": "result", "train_loss_curve": [1, [2], ["a", "b"], [3, 1.0]]}, 0.0)
    assert (record.step, record.round, record.loss) == (0, 3, None)
    assert record.loss_curve() == [(3, 1.0)]
    assert curve_of({"x": "no list"}, "x") == []


def test_a_silent_worker_is_shown_as_such_once_it_has_started() -> None:
    record = Record("w0")
    assert record.shown_state(60.0) == "starting"
    record.apply(progress(1), 60.0)
    assert record.shown_state(61.0) == "training"
    assert record.shown_state(75.0) == "silent 15 s"
    record.apply({"event": "exit", "exit_code": -9}, 75.0)
    assert record.shown_state(75.0) == "killed (SIGKILL)"


def test_one_that_evaluates_is_not_silent() -> None:
    record = Record("w0")
    record.apply(progress(100), 60.0)
    record.apply(progress(100, state="evaluating"), 61.0)
    assert record.shown_state(99.0) == "evaluating"


def test_remaining_time_follows_the_pace() -> None:
    record = Record("w0")
    record.apply(progress(0), 100.0)
    assert record.remaining_s() is None
    record.apply(progress(25), 110.0)
    assert record.remaining_s() == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "done"),
        (4, "exit 4"),
        (130, "interrupted"),
        (-9, "killed (SIGKILL)"),
        (-2, "interrupted"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert exit_words(code) == words


def test_text_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tc") == "a\N{REPLACEMENT CHARACTER}[2Jb\n\tc"


# --------------------------------------------------------------------------------------- notes


def test_ordinary_events_make_no_line() -> None:
    notes = Notes()
    for event in (
        progress(3, peer="w0"),
        {"event": "listening", "peer": "w0"},
        {"event": "round", "peer": "w0"},
        {"event": "member", "peer": "w0", "peer_changed": "w1", "health": "alive"},
        {"event": "member", "peer": "w0", "peer_changed": "w1", "health": "left"},
        {"event": "exit", "peer": "w0", "exit_code": 0},
        {"event": "something new", "peer": "w0"},
    ):
        assert notes.line(event) is None


def test_what_several_report_is_said_once() -> None:
    notes = Notes()

    def seen(peer: str, health: str) -> str | None:
        return notes.line({"event": "member", "peer": peer, "peer_changed": "w2", "health": health})

    assert seen("w0", "suspect") == "w0 sees w2 suspect"
    assert seen("w1", "suspect") is None
    assert seen("w1", "dead") == "w1 sees w2 dead"
    assert seen("w3", "suspect") is None
    assert seen("w0", "alive") == "w0 sees w2 alive again"
    assert seen("w1", "suspect") == "w1 sees w2 suspect"

    start = {"event": "started", "group": ["w0", "w1"], "step": 0}
    assert notes.line({**start, "peer": "w0"}) == "w0 starts training at step 0 with w0, w1"
    assert notes.line({**start, "peer": "w1"}) is None


def test_failures_say_why_in_one_line() -> None:
    notes = Notes()
    line = notes.line(
        {
            "event": "round_failed",
            "peer": "w0",
            "fragment": 0,
            "round": 7,
            "reason": "the round's\ndeadline has passed",
            "waiting_for": ["w2"],
        }
    )
    assert line == (
        "w0 gave up round 7 of fragment 0: the round's deadline has passed; it waited for w2"
    )
    assert notes.line({"event": "exit", "peer": "w1", "exit_code": -9}) == (
        "w1 has ended: killed (SIGKILL)"
    )
    assert notes.line({"event": "warning", "peer": "w1", "text": "\x1b[2Jhm"}) == (
        "w1 warning: \N{REPLACEMENT CHARACTER}[2Jhm"
    )
