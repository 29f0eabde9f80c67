"""The report of a model in stages: what is the whole's, what is a stage's, and in which words."""

import io
from typing import Any

import pytest
from rich.console import Console

from coordinator.rendezvous.records import Record
from coordinator.report.printer import print_report
from coordinator.report.report import build_report

COUNTS = {
    "visits": 160,
    "repeated": 1,
    "rerouted": 0,
    "skipped": 0,
    "dropped": 0,
    "lost": 0,
    "other_snapshots": 4,
    "discarded": 0,
}
PARAMS = (1_000_000, 300_000, 200_000)


@pytest.fixture
def staged(result_event):
    """A worker's record: `w4` of three stages and two replicas serves stage 1."""

    def make(number: int, counts: dict[str, int] | None = None, **changes: object) -> Record:
        stage = number % 3
        event = result_event(
            f"w{number}",
            **{
                "stage": stage,
                "stages": 3,
                "routing": "full",
                "skip": 0.0,
                "microbatches": 8,
                "stage_counts": COUNTS | (counts or {}),
                "in_flight_peak_bytes": 4_000_000,
                "in_flight_limit_bytes": 64_000_000,
                "activation_bytes_sent": 1_500_000,
                "exchange_bytes_sent": 250_000,
                "iteration_s": 1.5,
                "iteration_p95_s": 2.0,
                "params": PARAMS[stage],
                "anchor_hash": f"a{stage}",
                "momentum_hash": f"m{stage}",
                "val_loss": 2.0 if number == 0 else None,
                "assembled": "out/w0/assembled/step-00000100" if number == 0 else None,
                "ddp_bytes": 10_000_000,
                **changes,
            },
        )
        record = Record(f"w{number}")
        record.apply({"event": "progress", "step": 90, "steps": 100, "stage": stage}, 0.0)
        record.apply(event, 1.0)
        record.apply({"event": "exit", "exit_code": 0}, 1.0)
        return record

    return make


def report_of(*records: Record) -> dict[str, Any]:
    return build_report(records, settings={}, elapsed_s=1.0)


def printed(report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_of(report: dict[str, Any], label: str) -> str:
    lines = (line.strip() for line in printed(report).splitlines())
    return next(line.removeprefix(label).strip() for line in lines if line.startswith(label))


def killed(number: int) -> Record:
    record = Record(f"w{number}")
    record.apply({"event": "progress", "step": 7, "steps": 100, "stage": number % 3}, 0.0)
    record.apply({"event": "exit", "exit_code": -9}, 0.0)
    return record


def test_the_model_is_the_sum_of_its_stages(staged) -> None:
    report = report_of(*(staged(number) for number in range(6)))
    assert report["params"] == 1_500_000
    assert report["val_loss"] == 2.0
    assert report["hashes_agree"] is True
    assert report["checkpoint"] == "out/w0/assembled/step-00000100"
    assert report["bytes_ratio"] == pytest.approx(40)  # 10 MB of DDP to 0.25 MB of exchange
    assert [peer["stage"] for peer in report["peers"]] == [0, 1, 2, 0, 1, 2]
    stages = report["stages"]
    assert (stages["count"], stages["routing"], stages["microbatches"]) == (3, "full", 8)
    assert stages["activation_bytes_per_iteration"] == 15_000
    summed = {key: 6 * number for key, number in COUNTS.items()}
    assert stages["counts"] == {**summed, "unconfirmed": 0}
    assert stages["by_stage"][1] == {
        "stage": 1,
        "replicas": 2,
        "reported": 2,
        "params": 300_000,
        "hashes_agree": True,
        "spread": None,
    }


def test_the_printed_report_names_a_stages_figures(staged) -> None:
    slow = staged(5, iteration_s=2.1, iteration_p95_s=9.0, in_flight_peak_bytes=32_000_000)
    text = printed(report_of(*(staged(number) for number in range(5)), slow))
    for expected in (
        "diloco · 6 workers · 3 stages · 100 inner steps · a round every 25 steps · 1.5 million",
        "2.0 MB per worker, of which 250.0 kB to agree within stages; DDP there would have sent "
        "10.0 MB, 40 times as much",
        "full; 8 microbatches an iteration from each of stage 0",
        "1.60 s in the median, 9.00 s at the 95th percentile",
        "15.0 kB per worker and iteration, gradients included",
        "at most 32.0 MB of the 64.0 MB that visits may hold",
        "equal within each of 3 stages, bit for bit",
        "checkpoint  out/w0/assembled/step-00000100",
    ):
        assert expected in text
    for trouble in ("DIFFER", "re-routed", "dropped", "discarded", "murmur assemble"):
        assert trouble not in text
    header = next(line for line in text.splitlines() if "worker" in line and "anchor" in line)
    assert header.split()[:3] == ["worker", "stage", "steps"]


def test_the_stage_that_differs_is_named(staged) -> None:
    records = [staged(number) for number in range(5)]
    report = report_of(*records, staged(5, momentum_hash="other"))
    assert report["hashes_agree"] is False
    assert line_of(report, "replicas").startswith("DIFFER within stage 2: not the same anchor")
    alone = {**report, "preset": "local"}
    assert line_of(alone, "replicas").startswith("differ, as they must")


def test_replicas_in_pairs_are_as_far_apart_as_their_stage_says(staged) -> None:
    spreads = {0: 0.01, 1: 0.02, 2: 0.03, 3: 0.03, 4: 0.02, 5: 0.03}
    records = [staged(n, spread=s, anchor_hash=f"own{n}") for n, s in spreads.items()]
    line = line_of(report_of(*records), "replicas")
    assert "2 % in stage 0, 2 % in stage 1, 3 % in stage 2" in line
    assert "DIFFER" not in line


def test_what_was_lost_on_the_way_is_told(staged) -> None:
    troubled = {"rerouted": 3, "skipped": 1, "dropped": 2, "discarded": 1}
    report = report_of(staged(0, troubled), staged(1, {"rerouted": 2}), staged(2), killed(4))
    assert line_of(report, "microbatches") == (
        "5 visits re-routed to another replica, 1 visit sent past a stage without replicas, "
        "2 microbatches dropped, 1 iteration of a stage discarded"
    )
    assert line_of(report, "replicas") == (
        "nothing to compare: no stage has two that reported to the end"
    )
    assert report["peers"][3]["stage"] == 1
    assert report["stages"]["by_stage"][1]["replicas"] == 2


def test_visits_that_a_killed_origin_was_not_sure_of_are_told(staged) -> None:
    """One that has reported has counted those that were lost itself."""
    reported, silent = staged(0, {"lost": 1}), killed(3)
    for record in (reported, silent):
        for iteration, replica, kind in (
            (4, "w1", "unconfirmed"),
            (4, "w1", "unconfirmed"),  # reports may come twice
            (4, "w2", "unconfirmed"),
            (5, "w1", "unconfirmed"),
            (4, "w2", "confirmed"),
        ):
            told = {"event": kind, "iteration": iteration, "replica": replica}
            record.apply({**told, "microbatches": [0, 2]}, 0.0)
    report = report_of(reported, staged(1), staged(2), silent)
    assert report["stages"]["counts"]["unconfirmed"] == 4
    assert line_of(report, "microbatches") == (
        "1 visit lost with a replica, 4 visits left unconfirmed by a worker that did not report"
    )


def test_without_every_stage_there_is_no_whole(staged) -> None:
    report = report_of(staged(0, assembled=None, val_loss=None), staged(2), staged(3), killed(1))
    assert report["params"] is None
    assert report["checkpoint"] is None
    text = printed(report)
    assert "parameters" not in text
    assert "equal within stage 0, bit for bit; of the others one or none reported" in text
    assert "of single stages; `murmur assemble` makes one of a run's" in text


def test_moves_and_rebuilt_stages_are_counted(staged) -> None:
    still, moved = staged(0), Record("w1")
    for stage, to in ((1, 2), (2, 1)):
        for event in ("moves", "moves", "rebuilt", "rebuilt"):  # reports may come twice
            moved.apply({"event": event, "stage": stage, "to": to, "from": {}}, 0.0)
    moved.apply({"event": "moves", "stage": 1, "to": 2}, 0.0)
    moved.apply({"event": "progress", "step": 90, "steps": 100, "stage": 2}, 0.0)
    report = report_of(still, moved)
    assert (report["stages"]["moves"], report["stages"]["rebuilds"]) == (3, 2)
    assert line_of(report, "moves") == "3 moves of a worker to another stage, 2 stages rebuilt"
    calm = report_of(still)
    assert (calm["stages"]["moves"], calm["stages"]["rebuilds"]) == (0, 0)
    assert "moves" not in printed(calm)


def test_the_time_that_is_not_computed_in_is_split(staged) -> None:
    """8 of 10 s are computed in, by the fixture."""
    waits = [
        {"visits_wait_s": 1.5, "rounds_wait_s": 0.25},
        {"visits_wait_s": 0.5, "rounds_wait_s": 0.0},
    ]
    report = report_of(*(staged(number, **wait) for number, wait in enumerate(waits)), staged(2))
    assert report["stages"]["rest"] == pytest.approx(
        {"microbatches": 0.1, "rounds": 0.0125, "other": 0.0875}
    )
    assert line_of(report, "the rest") == (
        "10.0 % waiting for microbatches, 1.2 % for rounds, 8.8 % other"
    )
    untold = report_of(staged(0), staged(1, visits_wait_s=1.0, rounds_wait_s=0.0, wall_s=0.0))
    assert untold["stages"]["rest"] is None
    assert "the rest" not in printed(untold)


def test_skips_and_slower_exchange_are_said(staged) -> None:
    changes = {"routing": "skip", "skip": 1 / 3, "exchange_bytes_sent": 20_000_000}
    report = report_of(*(staged(number, **changes) for number in range(3)))
    assert line_of(report, "routes").startswith("skip, 33 % of the stages left out; 8 micro")
    assert line_of(report, "bytes sent").endswith(
        "DDP there would have sent 10.0 MB, 2.0 times less"
    )


def test_when_all_have_died_nothing_is_made_up() -> None:
    report = report_of(killed(0), killed(1), killed(2))
    assert (report["params"], report["hashes_agree"], report["bytes_ratio"]) == (None, None, None)
    assert report["stages"]["count"] == 3
    text = printed(report)
    assert "3 workers · 3 stages" in text
    assert "not known: no worker reported to the end" in text


def test_nonsense_from_outside_is_passed_over(staged) -> None:
    nonsense = {
        "stages": "many",
        "routing": 7,
        "skip": None,
        "microbatches": None,
        "stage_counts": [1],
        "in_flight_peak_bytes": "x",
        "activation_bytes_sent": None,
        "iteration_s": None,
        "iteration_p95_s": None,
    }
    report = report_of(*(staged(number, **nonsense) for number in range(3)))
    assert report["params"] == 1_500_000
    assert set(report["stages"]["counts"].values()) == {0}
    assert "in flight" not in printed(report)


def test_a_whole_model_has_none_of_it(result_event) -> None:
    record = Record("w0")
    record.apply(result_event("w0"), 0.0)
    report = report_of(record)
    assert "stages" not in report
    assert "stage" not in report["peers"][0]
    assert "stage" not in printed(report)
