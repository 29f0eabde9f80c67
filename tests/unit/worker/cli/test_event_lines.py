import pytest

from worker.cli.event_lines import announce_plainly, describe


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
        ({"event": "started", "step": 0, "group": ["a", "b"]}, "started at step 0 with a, b"),
        (
            {"event": "progress", "state": "training", "step": 30, "steps": 90, "loss": 2.34567,
             "round": 2, "bytes_sent": 12_345_678},
            "step 30/90  loss 2.346  round 2  sent 12.3 MB",
        ),
        ({"event": "progress", "state": "waiting", "step": 30, "steps": 90, "loss": 2.0}, None),
        ({"event": "progress", "state": "ready"}, None),
        (
            {"event": "progress", "state": "evaluating", "step": 90, "steps": 90},
            "step 90/90  evaluating",
        ),
        (
            {"event": "validation", "step": 60, "val_loss": 2.34567, "seconds": 0.8},
            "step 60  validation loss 2.3457",
        ),
        (
            {
                "event": "validation", "step": 60, "val_loss": 2.34567,
                "val_metrics": {"accuracy": 0.91234, "top 5": 1.0},
            },
            "step 60  validation loss 2.3457, accuracy 0.9123, top 5 1",
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
        ({"event": "moves", "stage": 2, "to": 1}, "moves from stage 2 to stage 1"),
        (
            {"event": "rebuilt", "stage": 1, "from": {0: 0.25, 2: 0.75}},
            "rebuilt stage 1 from 25 % of stage 0 and 75 % of stage 2",
        ),
        ({"event": "member", "peer_changed": "w1", "health": "dead"}, "w1 is dead"),
        ({"event": "warning", "text": "the disk is full"}, "warning: the disk is full"),
        ({"event": "checkpoint", "path": "out/step-00000030"}, "checkpoint out/step-00000030"),
        (
            {"event": "result", "reason": "finished", "step": 90, "val_loss": 1.23456,
             "rounds_completed": 3, "anchor_hash": "ab12"},
            "finished at step 90: validation loss 1.2346, 3 rounds, anchor ab12",
        ),
        (
            {"event": "result", "reason": "Ctrl-C", "step": 9, "val_loss": None,
             "rounds_completed": 0, "anchor_hash": "ab12"},
            "Ctrl-C at step 9: 0 rounds, anchor ab12",
        ),
        ({"event": "round", "round": 3}, None),
    ],
)  # fmt: skip
def test_an_event_is_one_plain_line_or_none(event: dict[str, object], line: str | None) -> None:
    assert describe(event) == line


def test_lines_go_to_stdout_and_what_needs_none_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    announce_plainly({"event": "warning", "text": "x"})
    announce_plainly({"event": "round", "round": 3})
    assert capsys.readouterr().out == "warning: x\n"
