import math

import pytest

from murmuration.coordinator.records import Record
from murmuration.protos.events import costliest, curve_of
from tests.support.worker_status import result_event


@pytest.fixture
def record() -> Record:
    return Record("w0")


def progress(step: int) -> dict[str, object]:
    return {
        "event": "progress", "step": step, "steps": 100, "loss": 2.0, "rounds": 3,
        "bytes_sent": 10, "bytes_received": 20, "state": "training",
    }  # fmt: skip


def test_the_curve_is_bounded_and_keeps_its_start(record):
    for step in range(20_000):
        record.apply(progress(step), 0.0)
    assert len(record.curve) <= 4096
    assert record.curve[0][0] == 0
    assert record.curve[-1][0] > 19_000


def test_a_repeated_round_counts_once(record):
    for round_ in (1, 2, 2, 1, 3):
        record.apply({"event": "round", "fragment": 0, "round": round_}, 0.0)
    record.apply({"event": "round", "fragment": 1, "round": 1}, 0.0)
    record.apply({"event": "round_failed", "fragment": 0, "round": 4}, 0.0)
    assert (record.rounds_completed, record.rounds_failed) == (4, 1)


def test_lost_steps_are_those_of_all_times_so_far(record):
    for lost in (3, 7, 7):
        record.apply({"event": "put_back", "steps": 4, "steps_lost": lost}, 0.0)
    assert record.steps_lost == 7
    record.apply(result_event("w0", steps_lost=9), 1.0)
    assert record.steps_lost == 9


def test_values_of_a_wrong_type_are_passed_over(record):
    record.apply(progress(10), 0.0)
    record.apply({"event": ["what"]}, 0.0)
    record.apply({"event": "progress", "step": "x", "loss": "y", "state": 3, "rounds": None}, 0.0)
    record.apply({"event": "result", "train_loss_curve": [1, [2], ["a", "b"], [3, 1.0]]}, 0.0)
    assert (record.step, record.rounds_completed, record.loss) == (0, 3, None)
    assert record.loss_curve() == [(3, 1.0)]
    assert curve_of({"x": "no list"}, "x") == []


def test_a_silent_worker_is_shown_as_such_once_it_has_started(record):
    assert record.seen(60.0).state == "starting"
    record.apply(progress(1), 60.0)
    assert record.seen(61.0).state == "training"
    assert record.seen(75.0).state == "silent 15 s"
    record.apply({"event": "exit", "exit_code": -9}, 75.0)
    assert record.seen(75.0).state == "killed (SIGKILL)"


def test_losses_on_the_way_are_kept_in_order_and_the_workers_own_curve_counts(record):
    for step, loss in ((20, 3.0), (20, 9.0), (10, 9.0), (40, math.nan), (60, 2.0), ("x", 1.0)):
        record.apply({"event": "validation", "step": step, "val_loss": loss}, 0.0)
    assert record.validation_curve() == [(20, 3.0), (60, 2.0)]
    record.apply({"event": "result", "val_loss_curve": [[20, 3.0], [40, 2.5], [60, 2.0]]}, 0.0)
    assert record.validation_curve() == [(20, 3.0), (40, 2.5), (60, 2.0)]


def test_a_record_knows_the_faults_that_its_worker_found_and_the_report_has_each_once():
    verdict = {"kind": "machine", "peer": "w2", "measured": 0.2, "usual": 0.1, "cost": 0.3}
    w0, w1 = Record("w0"), Record("w1")
    w0.apply({"event": "located", "found": True, "verdict": verdict}, 0.0)
    assert w0.verdicts == [verdict]
    gone = {**verdict, "cost": 0.5, "until": "2026-01-05T14:12:31+01:00"}
    w0.apply({"event": "located", "found": False, "verdict": gone}, 1.0)
    w1.apply({"event": "result", "verdicts": [verdict, "damaged"]}, 2.0)
    assert (w0.verdicts, w1.verdicts) == ([gone], [verdict])
    assert costliest([w0.verdicts, w1.verdicts]) == [gone]
