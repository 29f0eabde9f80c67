"""The report of whole models and of stages: means, sums, one worker's word, and all in words."""

import io
import json
import math
import sys

import pytest
from rich.console import Console

from murmuration.coordinator.printer import figure_lines, print_report
from murmuration.coordinator.records import Record
from murmuration.coordinator.report import Report, build_report
from tests.support.worker_status import result_event

COUNTS = {"visits": 160, "repeated": 1, "rerouted": 0, "skipped": 0, "dropped": 0, "lost": 0,
          "other_snapshots": 4, "discarded": 0}  # fmt: skip
PARAMS = (1_000_000, 300_000, 200_000)


def finished(peer: str = "w0", **changes: object) -> Record:
    """A worker that has reported."""
    record = Record(peer)
    record.apply({"event": "progress", "step": 90, "state": "training"}, 0.0)
    record.apply(result_event(peer, **changes), 1.0)
    record.apply({"event": "exit", "exit_code": 0}, 1.0)
    return record


def staged(number: int, counts: dict[str, int] | None = None, **changes: object) -> Record:
    """The same of a model in stages: `w4` of three stages and two replicas serves stage 1."""
    stage, first = number % 3, number == 0
    told: dict[str, object] = {
        "stage": stage, "stages": 3, "routing": "full", "skip": 0.0, "microbatches": 8,
        "stage_counts": COUNTS | (counts or {}), "in_flight_peak_bytes": 4_000_000,
        "in_flight_limit_bytes": 64_000_000, "activation_bytes_sent": 1_500_000,
        "exchange_bytes_sent": 250_000, "iteration_s": 1.5, "iteration_p95_s": 2.0,
        "params": PARAMS[stage], "anchor_hash": f"a{stage}", "momentum_hash": f"m{stage}",
        "val_loss": 2.0 if first else None, "ddp_bytes": 10_000_000,
        "assembled": "out/w0/assembled/step-00000100" if first else None,
    }  # fmt: skip
    return finished(f"w{number}", **told | changes)


def killed(peer: str, stage: int | None = None) -> Record:
    record = Record(peer, stage=stage)
    told = {"event": "progress", "steps": 100, "bytes_sent": 700_000, "state": "training"}
    for step, loss in ((10, 4.0), (40, 3.0)):
        record.apply({**told, "step": step, "loss": loss, "bytes_received": 600_000}, 0.0)
    record.apply({"event": "round", "fragment": 0, "round": 0}, 0.0)
    record.apply({"event": "round_failed", "fragment": 0, "round": 1}, 0.0)
    record.apply({"event": "exit", "exit_code": -9}, 0.0)
    return record


def report_of(*records: Record, **settings: object) -> Report:
    return build_report(records, settings=settings, elapsed_s=1.0)


def lines(*records: Record, **changes: object) -> dict[str, str]:
    """Figures in words. Args: changes: of the report."""
    return dict(figure_lines(report_of(*records) | changes))


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ----------------------------------------------------------------------------------- whole models


def test_means_are_over_the_workers_that_reported():
    w0 = finished("w0", compute_s=8.0, compute_utilization=0.8, steps_lost=5)
    w1 = finished("w1", compute_s=6.0, compute_utilization=0.6, bytes_sent=4_000_000)
    report = report_of(w0, w1, killed("w2"))
    assert report["compute_s"] == pytest.approx(7.0)
    assert report["compute_utilization"] == pytest.approx(0.7)
    assert report["bytes_sent_per_worker"] == 3_000_000
    assert report["bytes_ratio"] == pytest.approx(100 / 3)
    assert (report["steps"], report["step"], report["workers"]) == (100, 100, 3)
    assert (report["rounds_completed"], report["rounds_failed"]) == (4, 1)
    assert (report["seed"], report["preset"], report["inner_steps"]) == (0, "diloco", 25)
    assert (report["hashes_agree"], report["reason"], report["steps_lost"]) == (True, "finished", 5)


def test_a_dead_worker_stands_with_its_last_numbers():
    report = report_of(finished(), killed("w1"))
    dead = report["peers"][1]
    assert dead["exit_code"] == -9
    assert (dead["steps"], dead["bytes_sent"], dead["rounds_completed"]) == (40, 700_000, 1)
    assert (dead["anchor_hash"], dead["val_loss"], dead["compute_s"]) == (None, None, None)
    assert report["hashes_agree"] is None  # one alone has nobody to agree with


def test_what_a_task_measures_is_a_mean_over_those_that_did():
    found = [{"accuracy": 0.5, "recall": 0.25}, {"accuracy": 0.75, "recall": math.nan}, None]
    report = report_of(*(finished(val_metrics=each) for each in found))
    assert report["val_metrics"] == {"accuracy": 0.625, "recall": 0.25}


def test_numbers_that_json_cannot_hold_become_null_and_so_do_those_that_no_sum_holds():
    curve, most = [[1, math.nan], [2, 1.0], [3, sys.float_info.max]], sys.float_info.max
    figures = {"val_loss": math.nan, "compute_s": math.inf, "stall_s": most}
    figures |= {"traffic": {"reductions": {"values": 1e-300, "encoded_bytes": 1e99}}}
    report = report_of(*(finished(n, train_loss_curve=curve, **figures) for n in ("w0", "w1")))
    read = json.loads(json.dumps(report, allow_nan=False))
    assert (read["val_loss"], read["compute_s"], read["stall_s"]) == (None, None, None)
    assert read["train_loss_curve"] == [[2, 1.0]]


# -------------------------------------------------------------------------------- models in stages


def test_the_model_is_the_sum_of_its_stages():
    report = report_of(*(staged(number) for number in range(6)))
    assert (report["params"], report["val_loss"], report["hashes_agree"]) == (1_500_000, 2.0, True)
    assert report["checkpoint"] == "out/w0/assembled/step-00000100"
    assert report["bytes_ratio"] == pytest.approx(40)  # 10 MB of DDP to 0.25 MB of exchange
    assert [peer["stage"] for peer in report["peers"]] == [0, 1, 2, 0, 1, 2]
    stages = report["stages"]
    assert (stages["count"], stages["routing"], stages["microbatches"]) == (3, "full", 8)
    assert stages["activation_bytes_per_iteration"] == 15_000
    summed = {key: 6 * number for key, number in COUNTS.items()}
    assert stages["counts"] == {**summed, "unconfirmed": 0}
    assert stages["by_stage"][1] == {
        "stage": 1, "replicas": 2, "reported": 2, "params": 300_000, "hashes_agree": True,
        "spread": None,
    }  # fmt: skip


def test_visits_that_a_killed_origin_was_not_sure_of_are_counted():
    """One that has reported has counted those that were lost itself."""
    reported, silent = staged(0, {"lost": 1}), killed("w3", stage=0)
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
    records = reported, staged(1), staged(2), silent
    assert report_of(*records)["stages"]["counts"]["unconfirmed"] == 4
    assert lines(*records)["microbatches"] == (
        "1 visit lost with a replica, 4 visits left unconfirmed by a worker that did not report"
    )


def test_moves_and_rebuilt_stages_are_counted():
    still, moved = staged(0), Record("w1")
    for stage, to in ((1, 2), (2, 1)):
        for event in ("moves", "moves", "rebuilt", "rebuilt"):  # reports may come twice
            moved.apply({"event": event, "stage": stage, "to": to, "from": {}}, 0.0)
    moved.apply({"event": "moves", "stage": 1, "to": 2}, 0.0)
    moved.apply({"event": "progress", "step": 90, "steps": 100, "stage": 2}, 0.0)
    stages = report_of(still, moved)["stages"]
    assert (stages["moves"], stages["rebuilds"]) == (3, 2)
    assert lines(still, moved)["moves"] == "3 moves of a worker to another stage, 2 stages rebuilt"
    assert "moves" not in lines(still)


def test_the_time_that_is_not_computed_in_is_split():
    """8 of 10 s are computed in, by the fixture."""
    records = [
        staged(number, visits_wait_s=visits_s, rounds_wait_s=rounds_s)
        for number, (visits_s, rounds_s) in enumerate([(1.5, 0.25), (0.5, 0.0)])
    ]
    assert report_of(*records, staged(2))["stages"]["rest"] == pytest.approx(
        {"microbatches": 0.1, "rounds": 0.0125, "other": 0.0875}
    )
    assert lines(*records)["the rest"] == (
        "10.0 % waiting for microbatches, 1.2 % for rounds, 8.8 % other"
    )
    untold = staged(0), staged(1, visits_wait_s=1.0, rounds_wait_s=0.0, wall_s=0.0)
    assert report_of(*untold)["stages"]["rest"] is None
    assert "the rest" not in lines(*untold)


def test_without_every_stage_there_is_no_whole():
    records = staged(0, assembled=None, val_loss=None), staged(2), staged(3), killed("w1", stage=1)
    report = report_of(*records)
    assert (report["params"], report["checkpoint"], report["stages"]["count"]) == (None, None, 3)
    said = dict(figure_lines(report))
    assert (
        said["replicas"] == "equal within stage 0, bit for bit; of the others one or none reported"
    )
    assert said["checkpoints"] == "of single stages; `murmur assemble` makes one of a run's"
    dead = report_of(*(killed(f"w{stage}", stage) for stage in range(3)))
    assert (dead["params"], dead["hashes_agree"], dead["bytes_ratio"]) == (None, None, None)
    assert "3 workers · 3 stages" in printed(dead)


def test_nonsense_from_outside_is_passed_over():
    nonsense = {
        "stages": "many", "routing": 7, "skip": None, "microbatches": None, "stage_counts": [1],
        "in_flight_peak_bytes": "x", "activation_bytes_sent": None, "iteration_s": 1.0,
        "iteration_p95_s": None,
    }  # fmt: skip
    report = report_of(*(staged(number, **nonsense) for number in range(3)))
    assert report["params"] == 1_500_000
    assert set(report["stages"]["counts"].values()) == {0}
    assert "in flight" not in printed(report)


# --------------------------------------------------------------------------------------- its words


@pytest.mark.parametrize(
    ("label", "changes", "words"),
    [
        ("validation loss", {"loss_unit": None}, "2.000"),
        ("validation loss", {"loss_unit": "mean squared error"}, "2.000 mean squared error"),
        ("validation loss", {"loss_unit": "nats per token"},
         "2.000 nats per token (perplexity 7.39)"),
        ("validation loss", {"val_loss": 1.25824, "val_loss_error": 0.0468, "loss_unit": None,
                             "val_metrics": {"accuracy": 0.625}}, "1.258 ± 0.047, accuracy 0.625"),
        ("validation loss", {"val_loss": None}, "not measured: no worker reported one"),
        ("validation loss", {"val_loss": None, "reason": "SIGTERM"},
         "not measured: stopped before the end"),
        ("on the way", {"val_loss_curve": [[20, 4.5], [40, 2.0]]}, "4.50 █▁ 2.00"),
        ("bytes sent", {"ddp_bytes": None}, "2.0 MB per worker"),
        ("bytes sent", {"ddp_bytes": 1_000_000}, "2.0 MB per worker; DDP in fp32 would have sent "
         "1.0 MB, 2.0 times less"),
        ("probes", {"probe_bytes_received": 1_900_000, "probe_bytes_sent": 3},
         "1.9 MB received and 0.000003 MB sent, not counted above: doctor, status, and rates that "
         "peers measure"),
        ("final mean", {"final_mean_bytes": 1.5e6, "final_mean_stall_s": 1.25, "traffic": {
            "final_mean": {"values": 4e5, "encoded_bytes": 1.6e6, "payload_bytes": 1.5e6}}},
         "exact, in fp32, of all replicas: 1.5 MB of these bytes, 30.00 bits per value; 1.2 s of "
         "the stall below"),
        ("bits per value", {"traffic": {
            "contributions": {"values": 8e6, "encoded_bytes": 2e6, "payload_bytes": 1e6}}},
         "1.00 in contributions (2.00 before zstd)"),
        ("waited for", {"stall_s_by_peer": {"w2": 1.5}, "longest_stalls": [
            {"stall_s": 0.75, "fragment": 0, "round": 3, "waited_for": "w2"}]},
         "w2 1.5 s; longest 0.75 s, w0 for round 3 of fragment 0 from w2"),
        ("slow", {"verdicts": [{"kind": "disk", "peer": "w1", "measured": 3.0, "usual": 0.1}]},
         "w1's disk, 3 s a checkpoint, others 100 ms since ?, no cost"),
        ("warning", {"warnings": ["w0 and w1 contribute the same values"]},
         "w0 and w1 contribute the same values"),
        ("rounds", {"steps_lost": 5, "most_overlap_steps": 2}, "4 completed, none failed; 5 inner "
         "steps lost, since values were not finite, up to 2 steps on their way"),
        ("rounds", {"rounds_completed": 9, "final_mean_rounds": 3, "fragments": 3}, "9 completed "
         "(3 of the final mean), none failed; each exchanges one of 3 fragments of the model"),
        ("replicas", {}, "nothing to compare: 1 worker reported to the end"),
    ],
)  # fmt: skip
def test_a_figure_in_words(label, changes, words):
    assert lines(finished(**changes))[label] == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "all 2 that reported hold identical anchors and momenta, bit for bit"),
        ({"momentum_hash": "cc"},
         "DIFFER: the 2 that reported do not hold the same anchor and momentum"),
        ({"momentum_hash": "cc", "step": 1},
         "not to be compared: the 2 that reported ended at different steps"),
        ({"momentum_hash": "cc", "preset": "local"},
         "differ, as they must: with preset local nothing is exchanged"),
        ({"momentum_hash": "cc", "spread": 0.02},
         "2 % from the mean of their pair when they last met; diloco.consensus=true ends with one"),
    ],
)  # fmt: skip
def test_whether_replicas_are_equal(changes, words):
    assert lines(finished("w0"), finished("w1", **changes))["replicas"] == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "equal within each of 3 stages, bit for bit"),
        ({5: {"momentum_hash": "x"}}, "DIFFER within stage 2: not the same anchor and momentum"),
        ({5: {"momentum_hash": "x", "preset": "local"}},
         "differ, as they must: with preset local nothing is exchanged"),
        ({n: {"anchor_hash": f"own{n}", "spread": 0.01 * (1 + n % 3)} for n in range(6)},
         "from the mean of their pair when they last met: 1 % in stage 0, 2 % in stage 1, 3 % in "
         "stage 2; diloco.consensus=true ends with one"),
    ],
)  # fmt: skip
def test_whether_the_replicas_of_stages_are(changes, words):
    records = [staged(number, **changes.get(number, {})) for number in range(6)]
    assert lines(*records)["replicas"] == words


def test_a_run_of_stages_in_words():
    counts = {"rerouted": 5, "skipped": 1, "dropped": 2, "discarded": 1}
    skips = {"routing": "skip", "skip": 1 / 3}
    records = [
        staged(0, counts, in_flight_peak_bytes=32_000_000, iteration_p95_s=9.0, **skips), staged(2)
    ]  # fmt: skip
    said = lines(*records)
    assert said["bytes sent"] == (
        "2.0 MB per worker, of which 250.0 kB to agree within stages; DDP there would have sent "
        "10.0 MB, 40 times as much"
    )
    assert said["routes"] == (
        "skip, 17 % of the stages left out; 8 microbatches an iteration from each of stage 0"
    )
    assert said["iteration"] == "1.50 s in the median, 9.00 s at the 95th percentile"
    assert said["activations"] == "15.0 kB per worker and iteration, gradients included"
    assert said["in flight"] == "at most 32.0 MB of the 64.0 MB that visits may hold"
    assert said["microbatches"] == (
        "5 visits re-routed to another replica, 1 visit sent past a stage without replicas, "
        "2 microbatches dropped, 1 iteration of a stage discarded"
    )
    assert said["replicas"] == "nothing to compare: no stage has two that reported to the end"
    calm = lines(*(staged(number) for number in range(6)))
    assert not {"microbatches", "moves", "checkpoints", "the rest"} & calm.keys()
    assert "stages" not in report_of(killed("w0"))


def test_a_whole_report_as_it_is_printed():
    records = [finished(f"w{n}", sample="def f():\n\treturn \x1b[2J1\n") for n in range(2)]
    report = report_of(*records, killed("w2")) | {"loss_png": "out/loss.png", "out": "report.json"}
    assert [line.rstrip() for line in printed(report).splitlines()] == EXPECTED.splitlines()


EXPECTED = """
diloco · 3 workers · 100 inner steps · a round every 25 steps · 1.5 million parameters

  validation loss  2.000 nats per byte (perplexity 7.39, 2.89 bits per byte)
  training loss    4.00 █▄▄▁ 2.50
  bytes sent       2.0 MB per worker; DDP in fp32 would have sent 100.0 MB, 50 times as much; in
                   bf16 25 times
  computing        80.0 % of the 10 s from first to last inner step; 1.0 s stalled on average
  rounds           4 completed, 1 failed
  replicas         all 2 that reported hold identical anchors and momenta, bit for bit
  loop lag         p50 0.2 ms, p99 2.0 ms, max 5.0 ms (slowest worker)

  worker   steps   rounds     sent   received   computing   stalled   anchor   end
 ───────────────────────────────────────────────────────────────────────────────────────────────
  w0         100        4   2.0 MB     1.9 MB        80 %     1.0 s   aaaa     done
  w1         100        4   2.0 MB     1.9 MB        80 %     1.0 s   aaaa     done
  w2          40        1   0.7 MB     0.6 MB           -         -   -        killed (SIGKILL)

A sample of what it writes
  | def f():
  |     return �[2J1

checkpoint  out/w0/checkpoints/100
loss curve  out/loss.png
report      report.json
"""
