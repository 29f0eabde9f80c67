import io

import pytest
from rich.console import Console

from coordinator.rendezvous.records import Record, costliest
from coordinator.report.progress import (
    EventFormatter,
    LiveProgress,
    PlainProgress,
    progress_for,
    progress_table,
    summary,
)
from protos.events import new_event


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


def test_ordinary_events_make_no_line() -> None:
    formatter = EventFormatter()
    for event in (
        {"event": "progress", "peer": "w0", "step": 3},
        {"event": "listening", "peer": "w0"},
        {"event": "round", "peer": "w0"},
        {"event": "member", "peer": "w0", "peer_changed": "w1", "health": "alive"},
        {"event": "member", "peer": "w0", "peer_changed": "w1", "health": "left"},
        {"event": "exit", "peer": "w0", "exit_code": 0},
        {"event": "something new", "peer": "w0"},
    ):
        assert formatter.line(event) is None


def test_what_several_report_is_said_once() -> None:
    formatter = EventFormatter()

    def seen(peer: str, health: str) -> str | None:
        return formatter.line(
            {"event": "member", "peer": peer, "peer_changed": "w2", "health": health}
        )

    assert seen("w0", "suspect") == "w0 sees w2 suspect"
    assert seen("w1", "suspect") is None
    assert seen("w1", "dead") == "w1 sees w2 dead"
    assert seen("w3", "suspect") is None
    assert seen("w0", "alive") == "w0 sees w2 alive again"
    assert seen("w1", "suspect") == "w1 sees w2 suspect"

    start = {"event": "started", "group": ["w0", "w1"], "step": 0}
    assert formatter.line({**start, "peer": "w0"}) == "w0 starts training at step 0 with w0, w1"
    assert formatter.line({**start, "peer": "w1"}) is None


def test_failures_say_why_in_one_line() -> None:
    formatter = EventFormatter()
    line = formatter.line(
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
    assert formatter.line({"event": "exit", "peer": "w1", "exit_code": -9}) == (
        "w1 has ended: killed (SIGKILL)"
    )
    assert formatter.line({"event": "warning", "peer": "w1", "text": "\x1b[2Jhm"}) == (
        "w1 warning: \N{REPLACEMENT CHARACTER}[2Jhm"
    )
    long = {"event": "warning", "peer": "w1", "text": "x" * 100_000}
    assert len(formatter.line(long) or "") == 500


BROKE = "shard 3 of round 5 of fragment 0 from w1 broke off"


def test_a_stall_is_said_once_by_all_and_again_when_it_has_doubled() -> None:
    formatter = EventFormatter()
    stall = {"event": "stalled", "round": 7, "waiting_for": ["w2"], "seconds": 6.0, "last_s": 2.5}
    line = formatter.line({**stall, "peer": "w0"})
    assert line == "w0 waits in round 7 for w2: 6 s so far, the last round took 2.5 s"
    assert formatter.line({**stall, "peer": "w1"}) is None
    assert "12 s so far" in str(formatter.line({**stall, "peer": "w1", "seconds": 12.0}))
    assert formatter.line({**stall, "peer": "w1", "round": 8}) is not None


def test_a_link_that_breaks_often_has_one_line_for_each_sender_and_round() -> None:
    formatter = EventFormatter()
    event = {"event": "refused", "peer": "w0", "reason": BROKE, "again": True}
    event |= {"sender": "w1", "round": 5}
    assert formatter.line(event) == f"w0 asks for it again: {BROKE}"
    assert formatter.line(event | {"reason": "another shard"}) is None
    for other in ({"round": 6}, {"sender": "w2"}, {"peer": "w3"}):
        assert formatter.line(event | other) is not None


def test_a_validation_loss_is_said_once_for_each_step() -> None:
    formatter = EventFormatter()

    def said(peer: str, step: int, loss: object) -> str | None:
        event = {"event": "validation", "peer": peer, "step": step, "val_loss": loss}
        return formatter.line(event)

    assert said("w1", 200, 2.34567) == "w1 measures a validation loss of 2.346 at step 200"
    assert said("w0", 200, 2.34567) is None
    assert said("w0", 400, "low") is None
    assert said("w0", 400, 2.0) == "w0 measures a validation loss of 2.000 at step 400"


def test_what_does_not_fit_is_refused() -> None:
    event = {"event": "refused", "peer": "w0", "reason": "part 7", "again": False}
    assert EventFormatter().line(event) == "w0 refused: part 7"


def test_a_move_and_a_rebuilt_stage_have_lines() -> None:
    formatter = EventFormatter()
    assert formatter.line({"event": "moves", "peer": "w5", "stage": 2, "to": 1}) == (
        "w5 moves from stage 2 to 1"
    )
    rebuilt = {"event": "rebuilt", "peer": "w5", "stage": 1, "from": {"0": 0.25, "2": 0.75}}
    assert formatter.line(rebuilt) == (
        "w5 has rebuilt stage 1 from 25 % of stage 0 and 75 % of stage 2"
    )


def test_what_is_missing_or_strange_is_left_open() -> None:
    formatter = EventFormatter()
    assert formatter.line({"event": "moves", "peer": "w5", "to": "\x1b"}) == (
        "w5 moves from stage ? to ?"
    )
    odd = {"event": "rebuilt", "peer": "w5", "stage": 1, "from": {"\x1b": 1.0, "2": "x"}}
    assert formatter.line(odd) == (
        "w5 has rebuilt stage 1 from 100 % of stage \N{REPLACEMENT CHARACTER}"
    )
    assert formatter.line({"event": "rebuilt", "peer": "w5", "from": 3}) == (
        "w5 has rebuilt stage ? from nothing"
    )


def test_a_stage_without_replicas_is_said_once_until_somebody_says_it_again() -> None:
    formatter = EventFormatter()

    def warned(peer: str, **fields: object) -> str | None:
        return formatter.line({"event": "warning", "peer": peer, "text": "gone", **fields})

    assert warned("w0", stage=2) == "w0 warning: gone"
    assert warned("w1", stage=2) is None
    assert warned("w1", stage=2) == "w1 warning: gone"
    assert warned("w0", stage=2) is None
    assert [warned("w0"), warned("w1")] == ["w0 warning: gone", "w1 warning: gone"]


@pytest.mark.parametrize(("confirmed_by", "tail"), [(["w3"], ""), ([], ", which nobody else has")])
def test_a_state_that_nobody_else_has_is_told(confirmed_by: list[str], tail: str) -> None:
    event = new_event("adopted", donor="w2", step=60, reason="ahead", confirmed_by=confirmed_by)
    line = EventFormatter().line({**event, "peer": "w1"})
    assert line is not None
    assert line.endswith(f"took over the state of w2 at step 60: ahead{tail}")


def test_a_fault_is_said_once_by_all_that_find_it_and_once_when_it_is_gone() -> None:
    formatter = EventFormatter()
    verdict = {"kind": "uplink", "peer": "w2", "measured": 3.1, "usual": 20.0, "cost": 0.04}
    verdict["since"] = "2026-01-05T14:02:31+01:00"
    found = {"event": "located", "found": True, "verdict": verdict}
    gone = {**found, "found": False}
    words = "w2's uplink, 3.1 of 20 Mbit/s since 14:02, cost 4 % of rounds"
    assert formatter.line({**found, "peer": "w0"}) == f"slow: {words}"
    assert formatter.line({**found, "peer": "w1"}) is None
    assert formatter.line({**gone, "peer": "w1"}) == f"no longer slow: {words}"
    assert formatter.line({**gone, "peer": "w0"}) is None
    assert formatter.line({**found, "peer": "w0"}) is not None


def test_a_record_knows_the_faults_that_its_worker_found_and_the_report_has_each_once() -> None:
    verdict = {"kind": "machine", "peer": "w2", "measured": 0.2, "usual": 0.1, "cost": 0.3}
    w0, w1 = Record("w0"), Record("w1")
    w0.apply({"event": "located", "found": True, "verdict": verdict}, 0.0)
    assert w0.verdicts == [verdict]
    gone = {**verdict, "cost": 0.5, "until": "2026-01-05T14:12:31+01:00"}
    w0.apply({"event": "located", "found": False, "verdict": gone}, 1.0)
    w1.apply({"event": "result", "verdicts": [verdict, "damaged"]}, 2.0)
    assert (w0.verdicts, w1.verdicts) == ([gone], [verdict])
    assert costliest([w0.verdicts, w1.verdicts]) == [gone]
