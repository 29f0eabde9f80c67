"""From reports to rows."""

from typing import Any

import pytest

from tests.lab.compare.tables import Conditions, cells, row_of

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
