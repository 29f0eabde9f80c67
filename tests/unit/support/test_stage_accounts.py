"""The books of a run in stages can fail: what nobody tells of is unexplained."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.stage_accounts import Accounts
from tests.support.workers import Event

MICROBATCHES = 4
STAGES = {"w0": 0, "w1": 1, "w2": 0}


def iteration(number: int, visits: int) -> Event:
    return {"event": "iteration", "iteration": number, "visits": visits, "time_s": float(number)}


def orphaned(counted: Sequence[int], began: Sequence[int]) -> Event:
    common = {"event": "orphaned", "iteration": 2, "origin": "w2"}
    return {**common, "microbatches": list(began), "counted": list(counted)}


def accounts(out: Path, events: Mapping[str, Sequence[Event]]) -> Accounts:
    for name, stage in STAGES.items():
        (out / name).mkdir()
        lines = [{"event": "progress", "stage": stage}, *events[name]]
        (out / name / "events.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Accounts(out, MICROBATCHES)


@pytest.mark.parametrize(
    ("told", "dropped", "unexplained"),
    [([range(4)], 4, 0), ([range(3)], 3, 1), ([], 0, 4), ([range(4), range(1)], 5, 1)],
    ids=["all told", "one untold", "nobody tells", "one told twice"],
)
def test_those_of_a_killed_origin_must_be_told_of_once(
    tmp_path: Path, told: list[range], dropped: int, unexplained: int
) -> None:
    events = {
        "w0": [iteration(1, 4), iteration(2, 4), iteration(3, 4)],
        "w1": [iteration(1, 8), *(orphaned((), began) for began in told), iteration(2, 4)],
        "w2": [iteration(1, 4)],  # and is killed
    }
    book = accounts(tmp_path, events).iteration(2)
    assert (book.begun, book.counted, book.dropped) == (8, 4, dropped)
    assert (book.twice, book.unexplained) == (0, unexplained)


def test_a_killed_origin_begins_nothing_later(tmp_path: Path) -> None:
    events = {
        "w0": [iteration(1, 4), iteration(2, 4), iteration(3, 4)],
        "w1": [iteration(1, 8), orphaned((), range(4)), iteration(2, 4), iteration(3, 4)],
        "w2": [iteration(1, 4)],
    }
    books = accounts(tmp_path, events)
    assert [books.iteration(number).begun for number in (1, 2, 3)] == [8, 8, 4]
    assert [books.iteration(number).unexplained for number in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize(("visits", "twice", "unexplained"), [(5, 1, 0), (4, 0, 0), (3, 0, 1)])
def test_visits_of_other_stages_are_those_that_came_back(
    tmp_path: Path, visits: int, twice: int, unexplained: int
) -> None:
    events = {
        "w0": [iteration(1, 4)],
        "w1": [iteration(1, visits)],
        "w2": [iteration(1, 0), *({"event": "dropped", "iteration": 1} for _ in range(4))],
    }
    book = accounts(tmp_path, events).iteration(1)
    assert (book.begun, book.counted, book.dropped) == (8, 4, 4)
    assert (book.twice, book.unexplained) == (twice, unexplained)
