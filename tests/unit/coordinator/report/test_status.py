"""How a status document is shown: aligned, in units, and whatever is in it."""

import io
from typing import Any

import pytest
from rich.console import Console

from coordinator.report.status import fact_lines, print_status, shown, traffic_rows

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
    console = Console(file=io.StringIO(), width=120, highlight=False)
    print_status(document, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


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
