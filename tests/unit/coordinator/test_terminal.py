"""A swarm on a terminal: the summary of all peers, once and again and again."""

import io
import json
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from murmuration.coordinator.records import Record
from murmuration.coordinator.terminal import (
    LiveScreen,
    Screen,
    print_status,
    screen_for,
    summary_of_records,
    swarm_table,
    watch,
)
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.worker.views.history import Look
from murmuration.worker.views.summary import PeerSummary, SwarmSummary

CONSOLE = Console(file=io.StringIO(), width=120, highlight=False)


# ------------------------------------------------------------------------------- again and again


def training(*steps: int) -> SwarmSummary:
    peers = [
        PeerSummary(f"w{n}", state="training", step=step, steps=400, loss=2.5, rtt_ms=12.5)
        for n, step in enumerate(steps)
    ]
    return SwarmSummary(
        peers=peers, run="00000000000000aa", preset="noloco", verdicts=["w1's disk"]
    )


def test_a_terminal_gets_a_table_that_keeps_the_notes_and_a_pipe_gets_lines():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=160, _environ={"TERM": "x"})
    live = screen_for(terminal, 0.0)
    assert isinstance(live, LiveScreen)
    live.show(training(100, 90), 1.0)
    live.note("[not markup]", 2.0)
    live.close()
    assert isinstance(terminal.file, io.StringIO)
    for expected in ("run 00000000, noloco", "step 90 of 400", "slow: w1's disk", "12.5 ms",
                     "2.0 s  [not markup]"):  # fmt: skip
        assert expected in terminal.file.getvalue()
    assert not isinstance(screen_for(CONSOLE, 0.0), LiveScreen)


def test_plain_lines_come_every_two_seconds_unless_they_would_say_the_same():
    stream = io.StringIO()
    screen = Screen(stream, 100.0)
    for tenth in range(50):
        screen.update(partial(training, min(tenth, 30)), 100.0 + tenth / 10)
    screen.update(lambda: training(30), 110.0)
    screen.note("w1: killed", 110.5)
    screen.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["0.0 s", "2.0 s", "4.0 s", "10.5 s"]
    assert lines[0].startswith("0.0 s  peers 1 training  step 0 of 400  loss 2.500")


def test_what_others_wrote_steers_no_terminal():
    hostile = PeerSummary("w\x1b[2J", state="[red]x", refused={"[b]": 2})
    with CONSOLE.capture() as said:
        CONSOLE.print(swarm_table(SwarmSummary(peers=[hostile], verdicts=["[b]"])))
    assert "[red]x" in said.get()
    assert "slow: [b]" in said.get()


def test_workers_are_shown_by_their_events():
    verdict = {"kind": "disk", "peer": "w1", "measured": 3.0, "usual": 0.1, "cost": 0.0}
    records = [Record("w0"), Record("w1")]
    for number, record in enumerate(records):
        progress = {"event": "progress", "step": 240 + number, "steps": 1200, "loss": 2.5,
                    "rounds": 9, "bytes_sent": 33_000_000, "state": "training",
                    "tokens_per_s": 1000.0, "steps_per_s": 8.0}  # fmt: skip
        record.apply(progress, 12.0)
        record.apply({"event": "located", "found": True, "verdict": verdict}, 12.0)
    assert summary_of_records(records, 12.0).line() == (
        "peers 2 training  step 240 of 1,200  loss 2.500  rounds 9  tokens a second 2,000  "
        "sent by all 66.0 MB  to go about 2 min 00 s  "
        "slow: w1's disk, 3 s a checkpoint, others 100 ms since ?, no cost"
    )
    records[0].apply({"event": "exit", "exit_code": -9}, 13.0)  # the dead hold back nobody
    line = summary_of_records(records, 13.0).line()
    assert line.startswith("peers 1 killed (SIGKILL), 1 training  step 241 of 1,200")


class Watched:
    """A peer that answers until it is gone, and a clock that moves a second at a time."""

    def __init__(self, **document: Any) -> None:
        member = {"peer": "w0", "health": "alive", "address": "w0:1"}
        self.document = {"peer": "w0", "phase": "training", "steps": 400, "steps_per_s": 10.0,
                         "members": [member], **document}  # fmt: skip
        self.there, self.now_s = True, 0.0

    def look(self) -> Look:
        if not self.there:
            raise MurmurError("w0:1 does not answer", ExitCode.UNREACHABLE)
        return Look(1000.0 + self.now_s, self.document, {"w0": self.document})

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def ends(self, _seconds: float) -> None:
        self.there = False


@pytest.mark.parametrize(
    ("state", "step", "ends"),
    [("done", 400, True), ("training", 399, True), ("training", 9, False)],
)
def test_it_ends_with_the_run_and_says_when_a_run_under_way_is_gone(state, step, ends):
    watched, shown_ = Watched(phase=state, step=step), io.StringIO()
    lost = "no peer has answered for 30 s; last seen: peers 1 training  step 9 of 400"
    with nullcontext() if ends else pytest.raises(MurmurError, match=lost):
        watch(watched.look, Screen(shown_, 0.0), 2.0, watched.clock, watched.ends)
    assert len(shown_.getvalue().splitlines()) == 1


def test_a_script_gets_the_documents_of_the_page_until_ctrl_c(capsys):
    pauses = iter([None, KeyboardInterrupt])

    def sleep(_seconds: float) -> None:
        if (error := next(pauses)) is not None:
            raise error

    watched = Watched(step=10, tokens_per_s=5.0)
    watch(watched.look, None, 2.0, watched.clock, sleep)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["swarm"]["left_s"] == 39.0
    assert first["peers"][0]["tokens_per_s"] == 5.0
    assert [len(each["points"]["w0"]) for each in (first, second)] == [1, 1]  # the new ones


def test_nobody_there_at_the_beginning_is_told_as_status_tells_it():
    watched = Watched()
    watched.there = False
    with pytest.raises(MurmurError, match="w0:1 does not answer"):
        watch(watched.look, Screen(io.StringIO(), 0.0), 2.0)


# ------------------------------------------------------------------------------------------- once


def printed(first: dict[str, Any], **answers: dict[str, Any]) -> str:
    with CONSOLE.capture() as said:
        print_status(Look(1000.0, first, answers), CONSOLE)
    return said.get()


def test_status_is_a_row_for_each_peer_and_the_warnings_of_the_peer_that_was_asked():
    members = [
        {"peer": "w0", "health": "alive", "address": "192.0.2.7:7700"},
        {"peer": "w1", "health": "dead", "address": "192.0.2.8:7700", "step": 7},
    ]
    own = {"peer": "w0", "phase": "training", "step": 1200, "loss": 2.34567, "members": members,
           "traffic": {"bytes_sent": 10_000_000}, "warnings": ["one \x1b[2J", "[two]"],
           "encrypted": False}  # fmt: skip
    *_, first, second, _, one, two, insecure = printed(own, w0=own).splitlines()
    assert first.split() == ["w0", "192.0.2.7:7700", "training", "1,200", "2.346", "10.0", "MB"]
    assert second.split()[:4] == ["w1", "192.0.2.8:7700", "dead", "7"]
    assert (one, two) == ("warning: one \ufffd[2J", "warning: [two]")
    assert insecure.startswith("warning: nothing is encrypted (--insecure)")


def test_a_run_on_one_machine_needs_no_encryption_and_without_members_it_says_so():
    members = [{"peer": "w0", "health": "alive", "address": "127.0.0.1:7700"}]
    for encrypted in (True, False):
        said = printed({"peer": "w0", "members": members, "encrypted": encrypted})
        assert "encrypted" not in said
    assert printed({"kind": "coordinator", "members": []}) == "no members are known yet\n"
