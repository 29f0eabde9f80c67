"""A swarm on a terminal: one status document in units, and the summary again and again."""

import io
import json
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from murmuration.coordinator import Failure
from murmuration.coordinator.records import Record
from murmuration.coordinator.terminal import (
    LiveScreen,
    Screen,
    fact_lines,
    print_status,
    screen_for,
    shown,
    summary_of_records,
    swarm_table,
    traffic_rows,
    watch,
)
from murmuration.protos.exit_codes import ExitCode
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


def test_a_terminal_gets_a_table_that_keeps_the_notes_and_a_pipe_gets_lines() -> None:
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


def test_plain_lines_come_every_two_seconds_unless_they_would_say_the_same() -> None:
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


def test_what_others_wrote_steers_no_terminal() -> None:
    hostile = PeerSummary("w\x1b[2J", state="[red]x", refused={"[b]": 2})
    with CONSOLE.capture() as said:
        CONSOLE.print(swarm_table(SwarmSummary(peers=[hostile], verdicts=["[b]"])))
    assert "[red]x" in said.get()
    assert "slow: [b]" in said.get()


def test_workers_are_shown_by_their_events() -> None:
    verdict = {"kind": "disk", "peer": "w1", "measured": 3.0, "usual": 0.1, "cost": 0.0}
    records = [Record("w0"), Record("w1")]
    assert summary_of_records(records, 0.0).line() == "peers 2 starting"
    for number, record in enumerate(records):
        progress = {"event": "progress", "step": 240 + number, "steps": 1200, "loss": 2.5,
                    "rounds": 9, "bytes_sent": 33_000_000, "state": "training",
                    "tokens_per_s": 1000.0, "steps_per_s": 8.0}  # fmt: skip
        record.apply(progress, 12.0)
        record.apply({"event": "located", "found": True, "verdict": verdict}, 12.0)
    words = "w1's disk, 3 s a checkpoint, others 100 ms since ?, no cost"
    assert summary_of_records(records, 12.0).line() == (
        "peers 2 training  step 240 of 1,200  loss 2.500  rounds 9  tokens a second 2,000  "
        f"sent by all 66.0 MB  to go about 2 min 00 s  slow: {words}"
    )
    gone = verdict | {"until": "2026-01-05T14:12:31+01:00"}
    for record in records:
        record.apply({"event": "located", "found": False, "verdict": gone}, 13.0)
    records[0].apply({"event": "exit", "exit_code": -9}, 13.0)  # the dead hold back nobody
    line = summary_of_records(records, 13.0).line()
    assert line.startswith("peers 1 killed (SIGKILL), 1 training  step 241 of 1,200")
    assert "slow" not in line


class Watched:
    """A peer that answers until it is gone, and a clock that moves a second at a time."""

    def __init__(self, **document: Any) -> None:
        member = {"peer": "w0", "health": "alive", "address": "w0:1"}
        self.document = {"peer": "w0", "phase": "training", "steps": 400, "steps_per_s": 10.0,
                         "members": [member], **document}  # fmt: skip
        self.there = True
        self.now_s = 0.0

    def look(self) -> Look:
        if not self.there:
            raise Failure("w0:1 does not answer", ExitCode.UNREACHABLE)
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
def test_it_ends_with_the_run_and_says_when_a_run_under_way_is_gone(
    state: str, step: int, ends: bool
) -> None:
    watched, shown_ = Watched(phase=state, step=step), io.StringIO()
    if ends:
        watch(watched.look, Screen(shown_, 0.0), 2.0, watched.clock, watched.ends)
    else:
        lost = "no peer has answered for 30 s; last seen: peers 1 training  step 9 of 400"
        with pytest.raises(Failure, match=lost):
            watch(watched.look, Screen(shown_, 0.0), 2.0, watched.clock, watched.ends)
    assert len(shown_.getvalue().splitlines()) == 1


def test_a_script_gets_the_documents_of_the_page_until_ctrl_c(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_nobody_there_at_the_beginning_is_told_as_status_tells_it() -> None:
    watched = Watched()
    watched.there = False
    with pytest.raises(Failure, match="w0:1 does not answer"):
        watch(watched.look, Screen(io.StringIO(), 0.0), 2.0)


# --------------------------------------------------------------------------- one status document

WORKER = {
    "kind": "worker",
    "peer": "w0",
    "step": 1200,
    "steps": 2000,
    "loss": 2.34567,
    "up_s": 40.0,
    "members": [
        {"peer": "w0", "address": "127.0.0.1:7700", "step": 1200, "versions": [3]},
        {"peer": "worker-1", "address": "127.0.0.1:77", "step": 90, "versions": [4, 5, 5]},
    ],
    "traffic": {
        "bytes_sent": 10_000_000,
        "bytes_received": 5_000_000,
        "payload_bytes_sent": 9_000_000,
        "sent_by_method": {"Control/Gossip": 1600, "Data/Exchange": 9_500_000},
        "received_by_method": {"Data/Exchange": 4_000_000},
    },
    "rounds": {"completed": 3, "failed": 0},
    "refused": {},
    "loop_lag_ms": {"p50": 0.2, "max": 61.0},
}


def printed(document: dict[str, Any]) -> list[str]:
    with CONSOLE.capture() as said:
        print_status(document, CONSOLE)
    return [line.rstrip() for line in said.get().splitlines()]


def table(document: dict[str, Any], title: str) -> list[str]:
    """The header and rows under a title."""
    lines = printed(document)
    rest = lines[lines.index(title) + 2 :]
    end = rest.index("") if "" in rest else len(rest)
    return [rest[0], *rest[2:end]]


def test_facts_have_units() -> None:
    facts = dict(fact_lines(WORKER))
    assert facts["step"] == "1,200 of 2,000"
    assert (facts["loss"], facts["up"]) == ("2.346", "40.0 s")
    assert facts["rounds"] == "completed 3, failed 0"
    assert facts["refused"] == "none"
    assert facts["loop lag"] == "p50 0.2 ms, max 61.0 ms"


def test_traffic_is_told_by_method_and_as_mean_rates() -> None:
    header, *rows = [line.split("  ") for line in table(WORKER, "traffic")]
    assert [cell.strip() for cell in header if cell] == [
        "sent",
        "received",
        "mean sent",
        "mean received",
    ]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["in all", "10.0 MB", "5.0 MB", "2.00 Mbit/s", "1.00 Mbit/s"],
        ["Data/Exchange", "9.5 MB", "4.0 MB", "1.90 Mbit/s", "0.80 Mbit/s"],
        ["payload", "9.0 MB", "0 B", "1.80 Mbit/s", "0.00 Mbit/s"],
        ["Control/Gossip", "1.6 kB", "0 B", "0.00 Mbit/s", "0.00 Mbit/s"],
    ]


def test_without_a_beginning_there_are_no_rates() -> None:
    document = {key: value for key, value in WORKER.items() if key != "up_s"}
    assert list(traffic_rows(document)[0]) == ["", "sent_bytes", "received_bytes"]


def test_numbers_stand_on_the_right_and_words_on_the_left() -> None:
    header, first, second = table(WORKER, "members")
    for column in ("step", "round"):
        end = header.index(column) + len(column)
        assert first[end - 1].isdigit()
        assert second[end - 1].isdigit()
        assert [line[end : end + 2].strip() for line in (first, second)] == ["", ""]
    start = header.index("address")
    assert first[start:].startswith("127.0.0.1:7700")
    assert second[start:].startswith("127.0.0.1:77 ")
    assert second.endswith("4 to 5")


@pytest.mark.parametrize("staged", [True, False])
def test_stages_have_a_column_where_there_are_some(staged: bool) -> None:
    members = [{"peer": "w0", **({"stage": 0} if staged else {}), "step": 3}]
    assert ("stage" in table({"members": members}, "members")[0].split()) is staged


def test_a_coordinators_members_have_units_too() -> None:
    members = [{"peer": "w0", "bytes_sent": 2_500_000, "heard_s_ago": 0.4, "loss": None}]
    header, row = table({"members": members}, "members")
    assert header.split() == ["peer", "sent", "heard", "ago", "loss"]
    assert row.split() == ["w0", "2.5", "MB", "0.4", "s", "-"]


def test_whatever_is_there_is_shown_and_steers_no_terminal() -> None:
    document = {
        "peer": "w0\x1b[2J",
        "members": [{"peer": "w1", "versions": "x", "new_ms": 3}, {"peer": "w2", "health": None}],
        "traffic": {"bytes_sent": "many", "odd": 3, "lost_by_method": {"a": 1}},
        "something_new": [1, 2.5],
        "deep": {"inner_bytes": {"a": 2_000_000}},
        "\x1bkey": 1,
        "long": "x" * 100_000,
    }
    lines = printed(document)
    assert not any("\x1b" in line for line in lines)
    facts = dict(fact_lines(document))
    assert facts["something new"] == "1, 2.5"
    assert len(facts["long"]) == 300
    assert facts["traffic odd"] == "3"
    assert facts["deep"] == "inner (a 2.0 MB)"
    assert any(line.split() == ["w1", "-", "3.0", "ms", "-"] for line in lines)


def test_each_warning_has_a_line() -> None:
    lines = printed({"kind": "worker", "members": [], "warnings": ["one \x1b[2J", "two"]})
    assert lines[-3:-1] == ["warning: one \ufffd[2J", "warning: two"]
    assert not dict(fact_lines({"warnings": []}))


def test_without_members_it_says_so() -> None:
    assert printed({"kind": "coordinator", "members": []})[-1] == "no members are known yet"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("heard_s_ago", 75.2, "1 min 15 s"),
        ("link_mbps", 12.3456, "12.35 Mbit/s"),
        ("steps_per_s", 9.5, "9.5/s"),
        ("tokens_per_s", 48_640.25, "48,640/s"),
        ("step", 12_345, "12,345"),
        ("share", 0.123456, "0.1235"),
        ("flag", True, "True"),
        ("raw", b"\x01\xff", "01ff"),
    ],
)
def test_values_are_shown_in_the_unit_of_their_key(key: str, value: object, text: str) -> None:
    assert shown(key, value) == text


def test_that_nothing_is_encrypted_is_told_where_peers_are_on_other_machines() -> None:
    here = WORKER | {"encrypted": False}
    there = here | {"members": [{"peer": "w0", "address": "192.0.2.7:7700", "step": 1}]}
    assert not any("nothing is encrypted" in line for line in printed(here))
    assert any("nothing is encrypted (--insecure)" in line for line in printed(there))
    assert not any("nothing is encrypted" in line for line in printed(there | {"encrypted": True}))
