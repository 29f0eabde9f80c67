"""Shared by the coordinator's tests."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import fake_worker

Event = dict[str, Any]


@pytest.fixture(scope="session")
def fake_program() -> tuple[str, ...]:
    """What runs a worker that needs no torch: see `fake_worker.py`."""
    return (sys.executable, fake_worker.__file__)


@pytest.fixture
def result_event() -> Callable[..., Event]:
    """A worker's final event, with some fields changed."""

    def make(peer: str, **changes: object) -> Event:
        return {
            "event": "result", "peer": peer, "step": 100, "run_steps": 100, "steps": 100,
            "bytes_sent": 2_000_000, "bytes_received": 1_900_000, "payload_bytes_sent": 1_990_000,
            "payload_bytes_received": 1_890_000, "anchor_hash": "aaaa", "momentum_hash": "bbbb",
            "rounds_completed": 4, "rounds_failed": 0, "compute_s": 8.0, "stall_s": 1.0,
            "wall_s": 10.0, "compute_utilization": 0.8, "val_loss": 2.0,
            "loss_unit": "nats per byte", "train_loss_curve": [[50, 3.0], [100, 2.5]],
            "sample": None, "checkpoint": f"out/{peer}/checkpoints/100", "params": 1_500_000,
            "preset": "diloco", "inner_steps": 25, "seed": 0, "reason": "finished",
            "loop_lag_ms": {"p50": 0.2, "p99": 2.0, "max": 5.0}, "ddp_bytes": 100_000_000,
            **changes,
        }  # fmt: skip

    return make
