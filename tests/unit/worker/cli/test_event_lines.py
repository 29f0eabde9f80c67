import pytest

from worker.cli.event_lines import PlainLines, describe


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "listening", "peer": "w0", "address": "127.0.0.1:7700"},
            "w0 is reached at 127.0.0.1:7700, from this machine only\n"
            "another worker here joins with: murmur join 127.0.0.1:7700 --out runs/another",
        ),
        (
            {"event": "listening", "peer": "w0", "address": "192.0.2.7:7701",
             "origin": "as 192.0.2.1:7700 sees it"},
            "w0 is reached at 192.0.2.7:7701 (as 192.0.2.1:7700 sees it; --advertise says "
            "otherwise)\nanother machine joins with: murmur join 192.0.2.7:7701 "
            "--listen 0.0.0.0:7701",
        ),
        (
            {"event": "enrolled", "name": "w1", "token": "0123abcd"},
            "let in w1 by token 0123abcd",
        ),
        (
            {"event": "awaiting", "here": ["a"], "wanted": 3},
            "waits for 2 more peers to start (here: a)",
        ),
        (
            {"event": "awaiting", "here": [], "wanted": None},
            "waits for the others to start (here: nobody)",
        ),
        ({"event": "started", "step": 0, "group": ["a", "b"]}, "started at step 0 with a, b"),
        (
            {"event": "progress", "state": "training", "step": 30, "steps": 90, "loss": 2.34567,
             "rounds": 2, "bytes_sent": 12_345_678},
            "step 30/90  loss 2.346  rounds 2  sent 12.3 MB",
        ),
        (
            {"event": "progress", "state": "training", "step": 30, "steps": 90, "loss": None,
             "rounds": 2, "bytes_sent": 0, "tokens_per_s": 1234.5, "steps_per_s": 0.5, "peers": 3},
            "step 30/90  rounds 2  sent 0.0 MB  1,234 tokens/s  2 min 00 s to go  3 peers",
        ),
        (
            {"event": "progress", "state": "training", "step": 30, "steps": 1 << 40, "loss": 2.0,
             "rounds": 2, "bytes_sent": 0, "steps_per_s": 12.34, "peers": 1},
            "step 30  loss 2.000  rounds 2  sent 0.0 MB  12.3 steps/s  1 peer",
        ),
        (
            {"event": "run", "parameters": 382_000, "preset": "diloco", "inner_steps": 20,
             "steps": 1600, "tokens": 1024, "device": "cpu"},
            "382 thousand parameters, preset diloco, a round every 20 of 1,600 steps, 1,024 tokens "
            "a step, on cpu",
        ),
        (
            {"event": "run", "parameters": 5, "preset": "local", "inner_steps": None,
             "steps": 1 << 40, "tokens": None, "device": "cuda:0"},
            "5 parameters, preset local, without rounds, on cuda:0",
        ),
        ({"event": "progress", "state": "waiting", "step": 30, "steps": 90, "loss": 2.0}, None),
        ({"event": "progress", "state": "ready"}, None),
        (
            {"event": "progress", "state": "evaluating", "step": 90, "steps": 90},
            "step 90/90  evaluating",
        ),
        (
            {"event": "validation", "step": 60, "val_loss": 2.34567, "val_loss_error": 0.0123},
            "step 60  validation loss 2.346 ± 0.012",
        ),
        (
            {
                "event": "validation", "step": 60, "val_loss": 2.34567,
                "val_metrics": {"accuracy": 0.91234, "top 5": 1.0},
            },
            "step 60  validation loss 2.346, accuracy 0.9123, top 5 1",
        ),
        (
            {"event": "metrics", "url": "http://127.0.0.1:9464/metrics"},
            "metrics for Prometheus at http://127.0.0.1:9464/metrics",
        ),
        (
            {"event": "preempted", "source": "/run/notice"},
            "/run/notice says that this machine will go away: leaving",
        ),
        (
            {"event": "resumed", "path": "out/checkpoints/step-00000020", "step": 20},
            "goes on from out/checkpoints/step-00000020 (--fresh starts from step 0)",
        ),
        (
            {"event": "stalled", "fragment": 0, "round": 3, "waiting_for": ["w1", "w2"],
             "seconds": 14.2, "last_s": 3.04},
            "round 3 waits for w1, w2: 14 s so far, the last round took 3.0 s",
        ),
        (
            {"event": "round_failed", "round": 3, "reason": "w1 is gone"},
            "round 3 failed: w1 is gone",
        ),
        (
            {
                "event": "adopted",
                "donor": "w2",
                "step": 60,
                "reason": "ahead",
                "confirmed_by": ["w3"],
            },
            "took over w2's state at step 60: ahead",
        ),
        (
            {"event": "adopted", "donor": "w2", "step": 60, "reason": "ahead", "confirmed_by": []},
            "took over w2's state at step 60: ahead (on its word alone: nobody else has it)",
        ),
        (
            {"event": "adopted", "donor": "w2", "step": 60, "reason": "ahead",
             "rounds_given_up": 12, "apart": 0.0123},
            "took over w2's state at step 60: ahead; its own last 12 rounds are given up for it, "
            "which were 1.2 % apart",
        ),
        (
            {"event": "put_back", "step": 9, "fragments": [0, 1], "steps": 3, "steps_lost": 8},
            "parameters not finite at step 9: back to what they were before; 3 inner steps lost, "
            "8 so far",
        ),
        ({"event": "moves", "stage": 2, "to": 1}, "moves from stage 2 to stage 1"),
        (
            {"event": "rebuilt", "stage": 1, "from": {0: 0.25, 2: 0.75}},
            "rebuilt stage 1 from 25 % of stage 0 and 75 % of stage 2",
        ),
        ({"event": "member", "peer_changed": "w1", "health": "dead"}, "w1 is dead"),
        ({"event": "member", "peer_changed": "w1", "health": "left"}, "w1 has left"),
        ({"event": "warning", "text": "the disk is full"}, "warning: the disk is full"),
        ({"event": "checkpoint", "path": "out/step-00000030"}, "checkpoint out/step-00000030"),
        (
            {"event": "result", "reason": "finished", "step": 90, "val_loss": 1.23456,
             "rounds_completed": 3, "anchor_hash": "ab12"},
            "finished at step 90: validation loss 1.235, 3 rounds, anchor ab12",
        ),
        (
            {"event": "result", "reason": "Ctrl-C", "step": 9, "val_loss": None,
             "rounds_completed": 0, "anchor_hash": "ab12"},
            "Ctrl-C at step 9: 0 rounds, anchor ab12",
        ),
        (
            {"event": "round", "round": 3, "fragment": 1, "contributors": 4, "exchange_s": 1.234,
             "stall_s": 0.5},
            "round 3 of fragment 1: 4 peers, 1.23 s under way, 0.50 s waited for",
        ),
        ({"event": "head_start"}, None),
    ],
)  # fmt: skip
def test_an_event_is_one_plain_line_or_none(event: dict[str, object], line: str | None) -> None:
    assert describe(event) == line


def training(time_s: float, rounds: int) -> dict[str, object]:
    return {"event": "progress", "state": "training", "step": int(time_s), "steps": 90,
            "loss": 2.0, "rounds": rounds, "bytes_sent": 0, "time_s": time_s}  # fmt: skip


ROUND = {"event": "round", "round": 0, "fragment": 0, "contributors": 2, "exchange_s": 0.0,
         "stall_s": 0.0}  # fmt: skip
DONE = {"event": "checkpoint", "path": "x"}
WARNING = {"event": "warning", "text": "x"}


@pytest.mark.parametrize(
    ("verbosity", "steps"),
    [(0, [0, 2, 35, "c", "w"]), (1, [0, 1, "r", 2, 5, 35, "c", "w"]), (-1, ["w"])],
)
def test_training_is_a_line_a_round_and_more_or_less_if_asked(
    verbosity: int, steps: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    show = PlainLines(verbosity=verbosity)
    for event in (training(0, 0), training(1, 0), ROUND, training(2, 1), training(5, 1),
                  training(35, 1), DONE, WARNING):  # fmt: skip
        show(event)
    lines = capsys.readouterr().out.splitlines()
    marks = [line.split("/")[0].removeprefix("step ") for line in lines]
    known = {"round 0 of fragment 0: 2 peers, 0.00 s under way, 0.00 s waited for": "r",
             "checkpoint x": "c", "warning: x": "w"}  # fmt: skip
    assert [known.get(mark) or int(mark) for mark in marks] == steps


def test_a_line_begins_with_the_time_of_day_and_since_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = "2026-01-02T14:02:31.123+01:00"
    PlainLines()({"event": "warning", "text": "x", "at": at, "time_s": 12.345})
    assert capsys.readouterr().out == "14:02:31+0100    12.3 s  warning: x\n"
