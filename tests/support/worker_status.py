"""The words of a worker to `murmur status` and at its end, made up."""

from typing import Any

STATUS: dict[str, Any] = {
    "kind": "worker", "peer": "w0", "run": "00000000000000aa", "preset": "noloco",
    "phase": "training", "step": 120, "steps": 2000, "loss": None, "val_loss": 2.25,
    "learning_rate": 0.003, "steps_per_s": 9.5, "samples": None, "samples_per_s": None,
    "tokens": 61440, "tokens_per_s": 4864.0,
    "members": [{"health": "alive"}, {"health": "alive"}, {"health": "suspect"}],
    "traffic": {
        "sent_by_method": {"Control/Gossip": 1600, "Data/PairRound": 9000},
        "received_by_method": {"Data/PairRound": 8000},
        "payload_bytes_sent": 8900,
        "payload_bytes_received": 7900,
    },
    "rounds": {
        "completed": 6, "failed": 1, "steps_lost": 9, "late": 2, "takeovers": 3, "exchange_s": 4.5,
    },
    "relayed": {"for": ["w3"], "tunnels": 2, "relayed_bytes": {"w3": 7000}},
    "refused": {"invalid": 2, "again": 5},
    "microbatches": {"visits": 40, "dropped": 1},
    "verdicts": [
        {
            "kind": "uplink", "peer": "w2", "measured": 3.1, "usual": 20.0, "unit": "mbps",
            "cost": 0.04, "since": "2026-01-05T14:02:31+01:00",
        },
    ],
    "loop_lag_ms": {"p50": 0.5, "p99": 4.0, "max": 9.0},
}  # fmt: skip


def result_event(peer: str, **changes: object) -> dict[str, Any]:
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
