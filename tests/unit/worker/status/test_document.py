"""What a peer tells of its rounds: totals, the latest, and those on their way."""

import asyncio
from collections.abc import Iterable

import pytest

from murmuration.protos.events import new_event
from murmuration.worker.status import document as lag
from murmuration.worker.status.document import LagMonitor, RoundLog
from tests.support.fake_clock import FakeClock


def test_a_round_from_its_start_to_the_step_after_it() -> None:
    clock = FakeClock()
    rounds, clock.now_s = RoundLog(clock), 100.0
    rounds.began(0, 3)
    clock.now_s = 101.0
    rounds.told(new_event("progress", state="waiting"))
    clock.now_s = 102.0
    assert rounds.waiting_s() == 1.0
    (under_way,) = rounds.recent()
    assert (under_way["began_s_ago"], under_way["ended_s_ago"]) == (2.0, None)

    rounds.completed(0, 3, exchange_s=2.0, waited_for="w4")
    rounds.told(new_event("round", fragment=0, round=3, stall_s=1.0, waited_for="w4"))
    clock.now_s = 104.0
    assert rounds.recent() == [
        {
            "fragment": 0, "round": 3, "began_s_ago": 4.0, "ended_s_ago": 2.0, "failed": False,
            "waited_for": "w4", "stall_s": 1.0, "resumed_s_ago": 2.0,
        }
    ]  # fmt: skip
    assert rounds.waiting_s() is None
    assert (rounds.done, rounds.exchange_s) == (1, 2.0)


def test_one_round_of_a_fragment_is_on_its_way_and_the_latest_are_kept() -> None:
    rounds = RoundLog(FakeClock())
    for number in range(200):
        rounds.began(0, number)
        rounds.completed(0, number, exchange_s=0.1, waited_for="")
    rounds.began(0, 200)
    rounds.began(0, 201)

    told = [each["round"] for each in rounds.recent()]
    assert told == [*range(200 - 48, 200), 201]
    assert rounds.done == 200


def monitor_after(monkeypatch: pytest.MonkeyPatch, lags_s: Iterable[float]) -> LagMonitor:
    """A monitor whose sleeps were late by these seconds, one after another."""
    now, late = 0.0, iter(lags_s)

    async def sleep(seconds: float) -> None:
        nonlocal now
        try:
            now += seconds + next(late)
        except StopIteration:
            raise asyncio.CancelledError from None

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monitor = LagMonitor(lambda: now)
    with pytest.raises(asyncio.CancelledError):
        monitor.run().send(None)
    return monitor


def test_memory_is_bounded_and_the_largest_is_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag, "_SAMPLES", 100)
    lags_s = [0.5, *[0.001] * 2500, *[0.003] * 2500]
    monitor = monitor_after(monkeypatch, lags_s)
    assert len(monitor._samples_s) == 100
    summary = monitor.summary_ms()
    assert summary["max"] == 500.0
    assert summary["p99"] == pytest.approx(3.0)
    early = sum(lag_s < 0.002 for lag_s in monitor._samples_s)
    assert 30 <= early <= 70, "a uniform sample holds about half of each"
