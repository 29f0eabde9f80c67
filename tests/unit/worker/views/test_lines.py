"""Events in words: of one worker, and of all workers of a swarm."""

from collections.abc import Callable

import pytest

from murmuration.worker.views.lines import PlainLines, SwarmLines, describe, lasting


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "listening", "peer": "w0", "address": "127.0.0.1:7700"},
         "w0 is reached at 127.0.0.1:7700, from this machine only\n"
         "another worker here joins with: murmur join 127.0.0.1:7700 --out runs/another"),
        ({"event": "listening", "peer": "w0", "address": "192.0.2.7:7701",
          "origin": "as 192.0.2.1:7700 sees it"},
         "w0 is reached at 192.0.2.7:7701 (as 192.0.2.1:7700 sees it; --advertise says "
         "otherwise)\nanother machine joins with: murmur join 192.0.2.7:7701 "
         "--listen 0.0.0.0:7701"),
        ({"event": "awaiting", "here": ["a"], "wanted": 3},
         "waits for 2 more peers to start (here: a)"),
        ({"event": "progress", "state": "training", "step": 30, "steps": 90, "loss": None,
          "rounds": 2, "bytes_sent": 0, "tokens_per_s": 1234.5, "steps_per_s": 0.5, "peers": 3},
         "step 30/90  rounds 2  sent 0.0 MB  1,234 tokens/s  2 min 00 s to go  3 peers"),
        ({"event": "progress", "state": "training", "step": 30, "steps": 1 << 40, "loss": 2.0,
          "rounds": 2, "bytes_sent": 0, "steps_per_s": 12.34, "peers": 1},
         "step 30  loss 2.000  rounds 2  sent 0.0 MB  12.3 steps/s  1 peer"),
        ({"event": "progress", "state": "waiting", "step": 30, "steps": 90, "loss": 2.0}, None),
        ({"event": "validation", "step": 60, "val_loss": 2.34567,
          "val_metrics": {"accuracy": 0.91234, "top 5": 1.0}},
         "step 60  validation loss 2.346, accuracy 0.9123, top 5 1"),
        ({"event": "adopted", "donor": "w2", "step": 60, "reason": "ahead",
          "rounds_given_up": 12, "kept_steps": 80, "apart": 0.0123},
         "took over w2's state at step 60: ahead; its own last 12 rounds are given up, "
         "which were 1.2 % apart; 80 steps of these come again"),
        ({"event": "put_back", "step": 9, "fragments": [0, 1], "steps": 3, "steps_lost": 8},
         "parameters not finite at step 9: back to what they were before; 3 inner steps lost, "
         "8 so far"),
        ({"event": "result", "reason": "finished", "step": 90, "val_loss": 1.23456,
          "rounds_completed": 3, "anchor_hash": "ab12"},
         "finished at step 90: validation loss 1.235, 3 rounds, anchor ab12"),
        ({"event": "early_start"}, None),
    ],
)  # fmt: skip
def test_an_event_is_one_plain_line_or_none(event, line):
    assert describe(event) == line


def training(time_s: float, rounds: int) -> dict[str, object]:
    return {"event": "progress", "state": "training", "step": int(time_s), "steps": 90,
            "loss": 2.0, "rounds": rounds, "bytes_sent": 0, "time_s": time_s}  # fmt: skip


ROUND = {"event": "round", "round": 0, "fragment": 0, "contributors": 2, "exchange_s": 0.0,
         "stall_s": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("verbosity", "steps"),
    [(0, [0, 2, 35, "c", "w"]), (1, [0, 1, "r", 2, 5, 35, "c", "w"]), (-1, ["w"])],
)
def test_training_is_a_line_a_round_and_more_or_less_if_asked(verbosity, steps, capsys):
    show = PlainLines(verbosity=verbosity)
    for event in (training(0, 0), training(1, 0), ROUND, training(2, 1), training(5, 1),
                  training(35, 1), {"event": "checkpoint", "path": "x"},
                  {"event": "warning", "text": "x"}):  # fmt: skip
        show(event)
    lines = capsys.readouterr().out.splitlines()
    marks = [line.split("/")[0].removeprefix("step ") for line in lines]
    known = {"round 0 of fragment 0: 2 peers, 0.00 s under way, 0.00 s waited for": "r",
             "checkpoint x": "c", "warning: x": "w"}  # fmt: skip
    assert [known.get(mark) or int(mark) for mark in marks] == steps


def test_a_line_begins_with_the_time_of_day_and_since_the_start(capsys):
    at = "2026-01-02T14:02:31.123+01:00"
    PlainLines()({"event": "warning", "text": "x", "at": at, "time_s": 12.345})
    assert capsys.readouterr().out == "14:02:31+0100    12.3 s  warning: x\n"


Says = Callable[..., str | None]


@pytest.fixture
def said() -> Says:
    """The line of an event, of one peer, among all of a swarm."""
    lines = SwarmLines()
    return lambda peer, event, **fields: lines.line({"event": event, "peer": peer, **fields})


def test_what_several_report_is_said_once(said):
    for peer, health, line in (
        ("w0", "suspect", "w0: w2 is suspect"),
        ("w1", "suspect", None),
        ("w1", "dead", "w1: w2 is dead"),
        ("w3", "suspect", None),
        ("w0", "alive", "w0: w2 is alive"),
        ("w1", "suspect", "w1: w2 is suspect"),
    ):
        assert said(peer, "member", peer_changed="w2", health=health) == line
    start = {"group": ["w0", "w1"], "step": 0}
    assert said("w0", "started", **start) == "w0: started at step 0 with w0, w1"
    assert said("w1", "started", **start) is None


def test_failures_say_why_in_one_line(said):
    failed = {"fragment": 0, "round": 7, "reason": "the round's\ndeadline has passed"}
    assert said("w0", "round_failed", **failed, waiting_for=["w2"]) == (
        "w0: round 7 of fragment 0 failed: the round's deadline has passed; it waited for w2"
    )
    assert said("w1", "exit", exit_code=-9) == "w1: killed (SIGKILL)"
    assert said("w1", "warning", text="\x1b[2Jhm") == f"w1: warning: {CONTROL}[2Jhm"
    assert len(said("w1", "warning", text="x" * 100_000) or "") == 500
    refused = said("w0", "refused", reason="part 7", sender="w1")
    assert refused == "w0: a message of w1 is not taken: part 7"


CONTROL = "\N{REPLACEMENT CHARACTER}"  # in the place of a control character
BROKE = "shard 3 of round 5 of fragment 0 from w1 broke off"


def test_a_stall_is_said_once_by_all_and_again_when_it_has_doubled(said):
    stall = {"round": 7, "waiting_for": ["w2"], "seconds": 6.0, "last_s": 2.5}
    line = "w0: round 7 waits for w2: 6 s so far, the last round took 2.5 s"
    assert said("w0", "stalled", **stall) == line
    assert said("w1", "stalled", **stall) is None
    assert "12 s so far" in str(said("w1", "stalled", **stall | {"seconds": 12.0}))
    assert said("w1", "stalled", **stall | {"round": 8}) is not None


def test_a_link_that_breaks_often_has_one_line_for_each_sender_and_round(said):
    event = {"peer": "w0", "reason": BROKE, "again": True, "sender": "w1", "round": 5}
    line = f"w0: a message of w1 is not taken: {BROKE}; it is sent again"
    assert said(event="refused", **event) == line
    assert said(event="refused", **event | {"reason": "another shard"}) is None
    for other in ({"round": 6}, {"sender": "w2"}, {"peer": "w3"}):
        assert said(event="refused", **event | other) is not None


def test_what_is_missing_or_strange_is_left_open(said):
    assert said("w5", "moves", to="\x1b") == f"w5: moves from stage ? to stage {CONTROL}"
    odd = said("w5", "rebuilt", stage=1, **{"from": {"\x1b": 1.0, "2": "x"}})
    assert odd == f"w5: rebuilt stage 1 from 100 % of stage {CONTROL}"
    assert said("w5", "rebuilt", **{"from": 3}) == "w5: rebuilt stage ? from nothing"


def test_a_stage_without_replicas_is_said_once_until_somebody_says_it_again(said):
    for peer, again in (("w0", False), ("w1", True), ("w1", False), ("w0", True)):
        line = said(peer, "warning", text="gone", stage=2)
        assert line == (None if again else f"{peer}: warning: gone")
    for peer in ("w0", "w1"):
        assert said(peer, "warning", text="gone") == f"{peer}: warning: gone"


def test_a_fault_is_said_once_by_all_that_find_it_and_once_when_it_is_gone(said):
    verdict = {"kind": "uplink", "peer": "w2", "measured": 3.1, "usual": 20.0, "cost": 0.04}
    verdict["since"] = "2026-01-05T14:02:31+01:00"
    words = "w2's uplink, 3.1 of 20 Mbit/s since 14:02, cost 4 % of rounds"
    for peer, found, line in (
        ("w0", True, f"slow: {words}"),
        ("w1", True, None),
        ("w1", False, f"no longer slow: {words}"),
        ("w0", False, None),
        ("w0", True, f"slow: {words}"),
    ):
        assert said(peer, "located", found=found, verdict=verdict) == line


def test_what_a_full_disk_does_not_take_is_no_error():
    with open("/dev/full", "w") as full:
        for _ in range(2):
            print("a line", file=lasting(full), flush=True)
