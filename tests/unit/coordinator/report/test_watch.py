"""All peers of a swarm in one table, by what each says itself."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from coordinator import Failure
from coordinator.report import watch as watching
from coordinator.report.watch import (
    LiveScreen,
    PlainScreen,
    Screen,
    Snapshot,
    Watch,
    screen_for,
    table,
    watch,
)
from protos.exit_codes import ExitCode

Document = dict[str, Any]


def member(name: str, **more: Any) -> Document:
    """As a worker knows one."""
    address = f"{name}:7700"
    known = {"peer": name, "address": address, "health": "alive", "phase": "training", "step": 90}
    return known | {"rtt_ms": 12.5, "versions": [4]} | more


class FakeSwarm:
    """Answers by address, and a clock that moves a second with each look at it."""

    def __init__(self, *names: str) -> None:
        self.members = [member(name) for name in names]
        self.documents = {f"{name}:7700": self.document(name) for name in names}
        self.asked: list[str] = []
        self.now_s = 0.0

    def document(self, name: str) -> Document:
        return {
            "kind": "worker",
            "peer": name,
            "run": "00000000000000aa",
            "preset": "noloco",
            "phase": "training",
            "step": 100,
            "steps": 400,
            "loss": 2.5,
            "steps_per_s": 10.0,
            "tokens_per_s": 1000.0,
            "members": self.members,
            "traffic": {"bytes_sent": 1_000_000, "bytes_received": 2_000_000},
            "rounds": {"completed": 5, "failed": 1, "steps_lost": 4, "late": 0},
            "refused": {"invalid": 3},
        }

    def ask(self, address: str, timeout_s: float) -> Document:
        self.asked.append(address)
        if address not in self.documents:
            raise Failure(f"{address} does not answer", ExitCode.UNREACHABLE)
        return self.documents[address]

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def watch(self) -> Watch:
        return Watch("w0:7700", self.ask, self.clock)


def test_each_peer_is_asked_itself() -> None:
    swarm = FakeSwarm("w0", "w1", "w2")
    swarm.documents["w1:7700"] |= {"step": 80, "steps_per_s": 8.0, "loss": 3.5, "refused": {}}
    seen = swarm.watch().look()
    assert sorted(swarm.asked) == ["w0:7700", "w1:7700", "w2:7700"]  # the first, only once
    assert [(row.peer, row.step, row.loss) for row in seen.rows] == [
        ("w0", 100, 2.5),
        ("w1", 80, 3.5),
        ("w2", 100, 2.5),
    ]
    assert (seen.run, seen.preset, seen.step, seen.steps) == ("00000000000000aa", "noloco", 80, 400)
    assert seen.left_s == 40.0  # the slowest: 320 steps at 8 a second
    assert seen.tokens_per_s == 3000.0
    assert [row.not_taken for row in seen.rows] == [
        {"round failed": 1, "step lost": 4, "invalid": 3},
        {"round failed": 1, "step lost": 4},
        {"round failed": 1, "step lost": 4, "invalid": 3},
    ]


def test_rates_are_of_the_time_between_two_looks() -> None:
    swarm = FakeSwarm("w0")
    watched = swarm.watch()
    (row,) = watched.look().rows
    assert (row.sent_mbps, row.received_mbps) == (None, None)
    swarm.documents["w0:7700"]["traffic"] = {"bytes_sent": 1_500_000, "bytes_received": 2_000_000}
    (row,) = watched.look().rows
    assert (row.sent_mbps, row.received_mbps) == (4.0, 0.0)
    swarm.documents["w0:7700"]["traffic"] = {"bytes_sent": 10, "bytes_received": 20}
    (row,) = watched.look().rows  # it was started again
    assert (row.sent_mbps, row.bytes_sent) == (None, 10)


def test_a_peer_that_cannot_be_reached_from_here_is_shown_as_others_know_it() -> None:
    swarm = FakeSwarm("w0", "w1")
    del swarm.documents["w1:7700"]
    swarm.members[1]["health"] = "suspect"
    row = swarm.watch().look().rows[1]
    assert (row.peer, row.answers, row.state, row.step) == ("w1", False, "suspect", 90)
    assert (row.loss, row.bytes_sent, row.rounds, row.rtt_ms) == (None, None, 4, 12.5)


def test_a_relayed_peer_is_said_to_be_and_is_not_asked_from_here() -> None:
    swarm = FakeSwarm("w0", "w1")
    swarm.members[0]["path"] = "direct"
    swarm.members[1] |= {"address": "w1@w0:7700", "path": "relayed by w0"}
    snapshot = swarm.watch().look()
    assert swarm.asked == ["w0:7700"]
    assert [(row.path, row.answers) for row in snapshot.rows] == [
        ("direct", True),
        ("relayed by w0", False),
    ]
    assert "path" in [str(column.header) for column in table(snapshot).columns]


def test_of_a_relayed_peer_pace_and_rounds_are_shown_by_what_members_know() -> None:
    swarm = FakeSwarm("w0", "w1")
    swarm.members[1] |= {"address": "w1@w0:7700", "versions": [4, 3]}
    watched = swarm.watch()
    found = []
    for step in (90, 90, 96, 96, 100):  # a look a second; members hear of it now and then
        swarm.members[1]["step"] = step
        row = watched.look().rows[1]
        found.append(row.steps_per_s)
    assert found == [None, None, 3.0, 3.0, 2.0]
    assert (row.step, row.steps, row.rounds, row.left_s) == (100, 400, 7, 150.0)
    swarm.members[1]["step"] = 10  # it was started again
    assert watched.look().rows[1].steps_per_s is None


def test_another_peer_behind_the_address_is_not_taken_for_the_one_that_had_it() -> None:
    swarm = FakeSwarm("w0", "w1")
    swarm.documents["w1:7700"] = swarm.document("w9")
    assert not swarm.watch().look().rows[1].answers


def test_the_dead_are_not_asked() -> None:
    swarm = FakeSwarm("w0", "w1", "w2")
    swarm.members[1]["health"], swarm.members[2]["health"] = "dead", "left"
    seen = swarm.watch().look()
    assert swarm.asked == ["w0:7700"]
    assert [row.state for row in seen.rows] == ["training", "dead", "left"]


def test_when_the_first_one_ends_another_is_asked() -> None:
    swarm = FakeSwarm("w0", "w1")
    watched = swarm.watch()
    watched.look()
    del swarm.documents["w0:7700"]
    seen = watched.look()
    assert [(row.peer, row.answers) for row in seen.rows] == [("w0", False), ("w1", True)]
    del swarm.documents["w1:7700"]
    with pytest.raises(Failure, match="w0:7700 does not answer"):
        watched.look()


def test_a_coordinator_knows_the_peers_too() -> None:
    swarm = FakeSwarm("w1")
    swarm.documents["w0:7700"] = {
        "kind": "coordinator",
        "run": "00000000000000aa",
        "members": [
            swarm.members[0] | {"rtt_ms": None},
            member("w2") | {"bytes_sent": 7, "bytes_received": 8, "loss": 1.5},
        ],
    }
    seen = swarm.watch().look()
    assert [(row.peer, row.answers, row.loss) for row in seen.rows] == [
        ("w1", True, 2.5),
        ("w2", False, 1.5),
    ]
    assert (seen.preset, seen.rows[1].bytes_sent) == ("noloco", 7)


def test_what_others_wrote_steers_no_terminal_and_breaks_nothing() -> None:
    swarm = FakeSwarm("w0")
    swarm.members[:] = [
        member("w0"), "w1", {"peer": 3}, member("w\x1b[2J", health="dead", step="many")
    ]  # fmt: skip
    swarm.documents["w0:7700"] |= {
        "traffic": 7, "rounds": [], "refused": {"a\x1b": 2, "b": "c"}, "loss": "x", "preset": None,
    }  # fmt: skip
    seen = swarm.watch().look()
    assert [row.step for row in seen.rows] == [100, 0]
    assert seen.rows[0].not_taken == {"a\ufffd": 2}
    console = Console(file=io.StringIO(), width=160)
    console.print(watching.table(seen))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in console.file.getvalue()
    json.dumps(seen.plain())


def shown_on(console: Console, *, as_json: bool, looks: list[Snapshot]) -> str:
    screen = screen_for(console, as_json=as_json)
    for each in looks:
        screen.show(each)
    screen.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_a_table_a_pipe_lines_and_a_script_json() -> None:
    swarm = FakeSwarm("w0", "w1")
    watched = swarm.watch()
    looks = [watched.look(), watched.look()]
    terminal = Console(
        file=io.StringIO(), force_terminal=True, width=160, _environ={"TERM": "xterm"}
    )
    assert isinstance(screen_for(terminal, as_json=False), LiveScreen)
    text = shown_on(terminal, as_json=False, looks=looks)
    assert "not taken" in text
    assert "invalid 3" in text
    assert "12.5 ms" in text
    pipe = Console(file=io.StringIO(), width=160)
    assert isinstance(screen_for(pipe, as_json=False), PlainScreen)
    (line,) = shown_on(pipe, as_json=False, looks=looks).splitlines()  # the same is not said again
    assert line.endswith(
        "step 100 of 400  loss 2.500  2,000 tokens/s  about 30 s to go  [2 training]"
    )
    script = Console(file=io.StringIO(), width=20)
    lines = shown_on(script, as_json=True, looks=looks).splitlines()
    documents = [json.loads(each) for each in lines]
    assert [each["left_s"] for each in documents] == [30.0, 30.0]
    assert documents[0]["peers"][1]["not_taken"] == {
        "round failed": 1,
        "step lost": 4,
        "invalid": 3,
    }


def test_where_a_task_does_not_count_in_tokens_samples_or_steps_are_told() -> None:
    swarm = FakeSwarm("w0")
    document = swarm.documents["w0:7700"]
    document["tokens_per_s"] = None
    assert watching._pace(swarm.watch().look().rows[0]) == "10 steps"
    document["samples_per_s"] = 25.5
    assert watching._pace(swarm.watch().look().rows[0]) == "25.5 samples"


@pytest.mark.parametrize(
    ("state", "step", "ends"),
    [("done", 400, True), ("training", 399, True), ("training", 9, False)],
)
def test_it_ends_with_the_run_and_says_when_a_run_under_way_is_gone(
    state: str, step: int, ends: bool
) -> None:
    swarm, shown = FakeSwarm("w0"), io.StringIO()
    swarm.documents["w0:7700"] |= {"phase": state, "step": step}
    watched = Watch("w0:7700", swarm.ask, swarm.clock, lambda _: swarm.documents.clear())
    if ends:
        watch(watched, Screen(shown), 2.0)
    else:
        lost = "no peer has answered for 30 s; last seen: step 9 of 400"
        with pytest.raises(Failure, match=lost):
            watch(watched, Screen(shown), 2.0)
    assert len(shown.getvalue().splitlines()) == 1


def test_ctrl_c_is_how_one_stops_to_watch() -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    swarm, shown = FakeSwarm("w0"), io.StringIO()
    watch(Watch("w0:7700", swarm.ask, swarm.clock, interrupted), Screen(shown), 2.0)
    assert len(shown.getvalue().splitlines()) == 1


def test_nobody_there_at_the_beginning_is_told_as_status_tells_it() -> None:
    with pytest.raises(Failure, match="nowhere:1 does not answer"):
        watch(Watch("nowhere:1", FakeSwarm().ask), Screen(io.StringIO()), 2.0)


def test_faults_that_a_peer_has_located_are_shown() -> None:
    swarm = FakeSwarm("w0", "w1")
    verdict = {"kind": "disk", "peer": "w1", "measured": 3.0, "usual": 0.1, "cost": 0.0}
    swarm.documents["w1:7700"]["verdicts"] = [verdict]
    seen = swarm.watch().look()
    assert seen.verdicts == [verdict]
    assert seen.plain()["verdicts"] == [verdict]
    words = "slow: w1's disk, 3 s a checkpoint, others 100 ms since ?, no cost"
    assert watching.summary(seen).endswith(words)
    console = Console(file=io.StringIO(), width=200)
    console.print(watching.table(seen))
    assert words in console.file.getvalue()
