"""From the reports of runs to the rows of `bench`."""

from typing import Any

import pytest

from tests.lab.bench import Row, tables


def report(**changes: object) -> dict[str, Any]:
    return {
        "steps": 400,
        "wall_s": 80.0,
        "compute_s": 40.0,
        "stall_s": 43.0,
        "rounds_completed": 22,
        "final_mean_rounds": 2,
        "final_mean_stall_s": 5.0,
        "bytes_sent_per_worker": 46_000_000.0,
        "val_loss": 1.5,
        "hashes_agree": True,
        "bits_per_value": {
            "contributions": {"bits_travelled": 3.0, "payload_bytes": 3000},
            "reductions": {"bits_travelled": 5.0, "payload_bytes": 5000},
            "final_mean": {"bits_travelled": 30.0, "payload_bytes": 90_000},
        },
        "peers": [],
        **changes,
    }


def row(name: str = "diloco", **changes: object) -> Row:
    return Row(link="20mbit", name=name, asked_steps=400, report=report(**changes))


LOCAL = {"steps_per_s": 10.0}


def test_every_figure_of_a_whole_run() -> None:
    """The mean that ends a run is not mixed into its rounds; 3 and 5 bits, of as many values."""
    assert row().cells(LOCAL) == [
        *("`diloco`", "50 %", "80 s", "50.0 %", "1.9 s", "115.0 kB", "4.00", "1.500", ""),
    ]


def test_fewer_steps_are_extrapolated_and_have_no_loss() -> None:
    assert row(steps=40, wall_s=16.0, compute_s=4.0).cells(LOCAL) == [
        *("`diloco`", "~25 %", "~160 s", "~25.0 %", "1.9 s", "1.1 MB", "4.00", "-"),
        "40 of 400 steps",
    ]


def test_what_went_less_well_is_said() -> None:
    lost = row(rounds_partial=3, rounds_failed=1, hashes_agree=False, peers=[{"exit_code": -9}, {}])
    assert lost.notes == [
        "3 rounds averaged without everybody's part",
        "1 failed round, over all workers",
        "1 worker did not come to the end",
        "replicas differ",
    ]
    assert row(hashes_agree=False, val_loss_spread=1e-7).notes == []
    assert row("local", hashes_agree=False).notes == []
    nothing = Row(link="20mbit", name="hivemind", asked_steps=400, problem="not installed")
    assert tables([row("local"), nothing]).splitlines()[-1] == (
        "| `hivemind` | - | - | - | - | - | - | - | not installed |"
    )


@pytest.mark.parametrize(("means", "sent"), [("namespaces", 122_500), ("relay", 115_000)])
def test_frames_count_where_the_link_has_counted_them(means: str, sent: float) -> None:
    link_bytes = {"w0": {"sent_bytes": 48_000_000}, "w1": {"sent_bytes": 50_000_000}}
    assert row(link_means=means, link_bytes=link_bytes).figures["sent_per_step_bytes"] == sent
