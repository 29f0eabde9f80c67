"""From reports to rows, and from rows to tables."""

import json
from typing import Any

import pytest

from algorithms.link import Link
from tests.lab.compare.tables import (
    HEADS,
    Conditions,
    LinkTable,
    Row,
    as_json,
    caption,
    cells,
    markdown,
    notes,
    plain_table,
    problem_row,
    row_of,
)

CONDITIONS = Conditions(workers=4, steps=400, seed=0, cores=2, params=381_600)


def report(**changes: object) -> dict[str, Any]:
    return {
        "steps": 400,
        "inner_steps": 20,
        "wall_s": 80.0,
        "compute_s": 40.0,
        "stall_s": 38.0,
        "rounds_completed": 20,
        "rounds_failed": 0,
        "bytes_sent_per_worker": 46_000_000.0,
        "val_loss": 1.5,
        "hashes_agree": True,
        "bits_per_value": {
            "contributions": {"bits_encoded": 4.1, "bits_travelled": 3.0, "payload_bytes": 3000},
            "reductions": {"bits_encoded": 4.1, "bits_travelled": 5.0, "payload_bytes": 5000},
        },
        "peers": [],
        **changes,
    }


def table(*rows: Row) -> LinkTable:
    return LinkTable(Link(rate_mbps=20), "20mbit", list(rows), "namespaces")


def test_every_figure_of_a_whole_run() -> None:
    row = row_of("diloco", 400, report(), local_speed=10.0)
    assert row.wall_s == 80.0
    assert row.compute_utilization == 0.5
    assert row.relative_speed == pytest.approx(0.5)  # 5 steps a second against 10
    assert row.stall_per_round_s == pytest.approx(1.9)
    assert row.sent_per_step_bytes == 115_000
    assert row.bits_per_parameter == pytest.approx(4.0)  # as many values of 3 bits as of 5
    assert (row.val_loss, row.extrapolated, row.notes) == (1.5, False, ())
    assert cells(row) == (
        *("diloco", "50 %", "80 s", "50.0 %", "1.9 s", "115.0 kB", "4.00", "1.500"),
    )


def test_the_mean_that_ends_a_run_is_not_mixed_into_its_rounds() -> None:
    told = report(rounds_completed=22, final_mean_rounds=2, stall_s=43.0, final_mean_stall_s=5.0)
    final = {"bits_encoded": 32.0, "bits_travelled": 30.0, "payload_bytes": 90_000}
    told["bits_per_value"] = {**told["bits_per_value"], "final_mean": final}
    plain = row_of("diloco", 400, report(), local_speed=10.0)
    assert row_of("diloco", 400, told, local_speed=10.0) == plain


def test_fewer_steps_are_extrapolated_and_have_no_loss() -> None:
    short = report(
        steps=40,
        wall_s=10.0,
        compute_s=4.0,
        stall_s=12.0,
        rounds_completed=2,
        bytes_sent_per_worker=4_600_000,
    )
    row = row_of("diloco", 400, short, local_speed=10.0)
    assert row.wall_s == pytest.approx(40 + 19 * 6)  # 0.1 s a step, 6 s a pause
    assert row.compute_utilization == pytest.approx(40 / 154)
    assert row.relative_speed == pytest.approx(40 / 154)
    assert row.val_loss is None
    assert row.notes == ("40 of 400 steps",)
    assert cells(row)[1:] == ("~26 %", "~154 s", "~26.0 %", "6 s", "115.0 kB", "4.00", "-")


@pytest.mark.parametrize("key", sorted(report()))
def test_any_key_may_be_none_or_missing(key: str) -> None:
    without = {name: value for name, value in report().items() if name != key}
    for given in (report(**{key: None}), without):
        row = row_of("diloco", 400, given, local_speed=None)
        assert len(cells(row)) == len(HEADS)
        assert row.relative_speed is None
    assert cells(row_of("diloco", 400, {}, 1.0)) == ("diloco", *["-"] * 7)


def test_local_sends_nothing_worth_telling() -> None:
    nothing = {"contributions": None, "reductions": None}
    row = row_of(
        "local",
        400,
        report(
            rounds_completed=0,
            stall_s=0,
            hashes_agree=False,
            bits_per_value=nothing,
            bytes_sent_per_worker=9000.0,
        ),
        local_speed=5.0,
    )
    assert (cells(row)[1], *cells(row)[4:7]) == ("100 %", "-", "-", "-")
    assert row.notes == ()


def test_what_went_less_well_is_said() -> None:
    row = row_of(
        "hivemind",
        400,
        report(
            rounds_partial=3,
            rounds_failed=1,
            hashes_agree=False,
            val_loss_spread=0.2,
            peers=[{"exit_code": -9}, {"exit_code": 0}, {}],
        ),
        None,
    )
    assert row.notes == (
        "3 of 20 rounds averaged without everybody's part",
        "1 failed round, over all workers",
        "1 worker did not come to the end",
        "replicas differ",
    )
    only_rounding = report(hashes_agree=False, val_loss_spread=1e-7)
    assert row_of("hivemind", 400, only_rounding, None).notes == ()
    assert row_of("diloco", 400, report(hashes_agree=False), None).notes == ("replicas differ",)


def test_frames_count_where_the_link_has_counted_them() -> None:
    """Other systems' reports count frames; the relay counts none."""
    link_bytes = {"w0": {"sent_bytes": 48_000_000}, "w1": {"sent_bytes": 50_000_000}, "w2": None}
    for means, expected in (("namespaces", 122_500), ("relay", 115_000), (None, 115_000)):
        told = report(link_bytes=link_bytes, link_means=means)
        assert row_of("diloco", 400, told, None).sent_per_step_bytes == expected


def test_markdown_has_a_note_column_only_where_something_is_to_be_said() -> None:
    whole = row_of("diloco", 400, report(), 10.0)
    quiet = markdown([table(whole)], CONDITIONS).splitlines()
    assert quiet[0].startswith("| 20 Mbit/s | speed beside local | wall time | ")
    assert quiet[2] == ("| `diloco` | 50 % | 80 s | 50.0 % | 1.9 s | 115.0 kB | 4.00 | 1.500 |")
    missing = problem_row("torchft", 400, "not installed\n(make bench-peers)")
    titled = row_of("hivemind", 400, report(system="hivemind 1 | fp32"), 10.0)
    noted = markdown([table(whole, missing, titled)], CONDITIONS).splitlines()
    assert noted[0].endswith("| validation loss | note |")
    assert len({line.replace("\\|", "").count("|") for line in noted[:5]}) == 1
    assert noted[3] == (
        "| `torchft` | - | - | - | - | - | - | - | not installed (make bench-peers) |"
    )
    assert noted[4].startswith("| hivemind 1 \\| fp32 |")


def test_the_caption_says_what_all_share() -> None:
    whole = row_of("diloco", 400, report(), 10.0)
    assert caption([table(whole)], CONDITIONS) == (
        "4 workers, 400 inner steps, a round every 20 steps, a model of 382 thousand parameters, "
        "seed 0, 2 cores shared by all workers, one thread each, links by namespaces."
    )
    short = row_of("ddp", 400, report(steps=20, inner_steps=1), 10.0)
    other = row_of("streaming", 400, report(inner_steps=50), 10.0)
    text = caption([table(whole, short, other)], CONDITIONS)
    assert "steps between rounds: diloco 20, streaming 50" in text
    assert "~: extrapolated from a run of fewer steps" in text


def test_the_title_tells_the_whole_link() -> None:
    slow = Link(rate_mbps=1000, delay_s=0.05, jitter_s=0.005, loss=0.1)
    assert LinkTable(slow, "").title == (
        "1,000 Mbit/s, 50 ms of delay, 5 ms of jitter, 0.1 broken connections a minute"
    )


def test_json_has_the_figures_as_they_are() -> None:
    failed = problem_row("torchft", 400, "failed: w0 has ended", failed=True)
    rows = (row_of("diloco", 400, report(wall_s=1 / 3), 1.0), failed)
    document = json.loads(json.dumps(as_json([table(*rows)], CONDITIONS), allow_nan=False))
    (link,) = document["links"]
    assert (link["link"], link["link_means"], document["params"]) == (
        *("20mbit", "namespaces", 381_600),
    )
    assert link["rows"][0]["wall_s"] == 1 / 3
    assert link["rows"][1]["problem"] == "failed: w0 has ended"


def test_the_terminal_shows_titles_figures_and_notes() -> None:
    rows = (row_of("diloco", 400, report(), 10.0), problem_row("torchft", 400, "skipped: [why]"))
    shown = plain_table(table(*rows))
    assert all(words in shown for words in ("20 Mbit/s", "115.0 kB", "torchft"))
    assert notes(table(*rows)) == ["torchft: skipped: [why]"]


def test_control_characters_of_a_failed_run_do_not_pass() -> None:
    row = problem_row("torchft", 400, "failed:\x1b[31m red\n  twice")
    assert "\x1b" not in str(row.problem)
    assert "\n" not in str(row.problem)
