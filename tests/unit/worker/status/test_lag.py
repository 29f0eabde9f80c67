"""The lag of the loop, measured on a clock that the test moves."""

import asyncio
from collections.abc import Iterable

import pytest

from murmuration.worker.status import LagMonitor
from murmuration.worker.status import document as lag


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


def test_before_the_first_sample_it_is_zero() -> None:
    assert LagMonitor(lambda: 0.0).summary_ms() == {"p50": 0.0, "p99": 0.0, "max": 0.0}


def test_it_reports_milliseconds_of_lateness(monkeypatch: pytest.MonkeyPatch) -> None:
    lags_s = [0.001] * 60 + [0.004] * 39 + [0.250]
    summary = monitor_after(monkeypatch, lags_s).summary_ms()
    assert summary == pytest.approx({"p50": 1.0, "p99": 4.0, "max": 250.0})


def test_waking_early_is_no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = monitor_after(monkeypatch, [-0.002] * 3).summary_ms()
    assert summary == {"p50": 0.0, "p99": 0.0, "max": 0.0}


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
