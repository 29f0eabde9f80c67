"""The final report: what all workers said, as one JSON document."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.launcher.staged import staged_figures
from coordinator.rendezvous.records import Curve, Record, float_of, int_of, printable, text_of

_LONGEST = 5

Report = dict[str, Any]

_LINK_KEYS = ("link", "link_means", "link_bytes")  # None where workers were on loopback
_SETTING_COUNTS = ("inner_steps", "seed", "params")
_PEER_COUNTS = (
    "tokens",
    "payload_bytes_sent",
    "payload_bytes_received",
    "payload_bytes_per_round",
    "ddp_bytes",
    "steps_in_flight",
)
_PEER_MEASURES = ("compute_s", "stall_s", "wall_s", "compute_utilization", "val_loss")
_STEP_MEASURES = ("step_s_idle", "step_s_in_flight")
_MEAN_MEASURES = (*_PEER_MEASURES, "blocked_s", "spread")
_PEER_TEXTS = ("anchor_hash", "momentum_hash", "reason", "checkpoint")


def build_report(
    records: Sequence[Record], *, settings: Mapping[str, object], elapsed_s: float
) -> Report:
    """Puts the workers' results together.

    `val_loss compute_s stall_s wall_s compute_utilization` are means over the workers that reported
    them. `step_s_idle step_s_in_flight` are the workers' median inner steps while no round is on
    its way and while one is, weighted by the number of such steps. `rounds_completed` is the most
    that one worker saw, `rounds_failed` the sum over workers. `spread` is how far replicas in pairs
    were from their group's mean when they last met, relative to its size. `loop_lag_ms` is the
    worst worker's. `bytes_ratio` says how many times more DDP would have sent. A worker that ended
    without a result stands in `peers` with what was last heard of it. What differs with a model in
    stages: see `staged_figures`.

    Args:
        records: one per worker.
        settings: preset, steps, inner_steps and seed as asked for, where no worker has told; link,
            link_means and link_bytes (sent and received of each worker) of shaped links.
        elapsed_s: from the command's start to its end.
    """
    results = [record.result for record in records if record.result is not None]
    told = dict(settings)
    for result in results:
        told |= _settings(result)
    peers = [_peer(record) for record in records]
    sent = _mean([float(peer["bytes_sent"]) for peer in peers if peer["anchor_hash"]])
    ddp = _mean([float(peer["ddp_bytes"]) for peer in peers if peer["ddp_bytes"] is not None])
    return {
        "preset": told.get("preset"),
        "workers": len(records),
        "steps": max((record.steps for record in records), default=0) or told.get("steps"),
        "step": max((record.step for record in records), default=0),
        "inner_steps": told.get("inner_steps"),
        "seed": told.get("seed"),
        "params": told.get("params"),
        **{key: told.get(key) for key in _LINK_KEYS},
        **{key: _mean([p[key] for p in peers if p[key] is not None]) for key in _MEAN_MEASURES},
        **_step_times(peers),
        "elapsed_s": round(elapsed_s, 3),
        "rounds_completed": max((record.rounds_completed for record in records), default=0),
        "rounds_failed": sum(record.rounds_failed for record in records),
        "bytes_sent_per_worker": sent,
        "ddp_bytes_per_worker": ddp,
        "bytes_ratio": ddp / sent if ddp and sent else None,
        "bits_per_value": {kind: _bits(results, kind) for kind in ("contributions", "reductions")},
        "stall_s_by_peer": _stalls(results),
        "longest_stalls": _longest(records),
        "hashes_agree": _agree(peers),
        "reason": _reason(peers),
        "loop_lag_ms": _worst([p["loop_lag_ms"] for p in peers if p["loop_lag_ms"]]),
        "sample": next((s for r in results if (s := text_of(r, "sample"))), None),
        "checkpoint": next((p["checkpoint"] for p in peers if p["checkpoint"]), None),
        "loss_png": None,
        "peers": peers,
        "train_loss_curve": mean_curve([record.loss_curve() for record in records]),
        **staged_figures(records),
    }


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Per step the mean over the workers that have a value there."""
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for step, loss in curve:
            by_step[step].append(loss)
    return [(step, sum(losses) / len(losses)) for step, losses in sorted(by_step.items())]


def write_report(report: Report, path: Path) -> None:
    """Writes the JSON so that a reader sees the old file or the new one, never a part."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    write_atomically(path, text.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Raises OSError; then nothing is left beside the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _peer(record: Record) -> dict[str, Any]:
    result = record.result or {}
    return {
        "peer": record.peer,
        **({} if record.stage is None else {"stage": record.stage}),
        "address": record.address,
        # Another machine's process: its word for it, where this one did not see it end.
        "exit_code": int_of(result, "exit_code") if record.exit_code is None else record.exit_code,
        "state": record.state,
        "step": record.step,
        "steps": int_of(result, "steps") if record.result else record.step,
        "bytes_sent": record.bytes_sent,
        "bytes_received": record.bytes_received,
        "rounds_completed": record.rounds_completed,
        "rounds_failed": record.rounds_failed,
        **{key: int_of(result, key) for key in _PEER_COUNTS},
        **{key: float_of(result, key) for key in (*_MEAN_MEASURES, *_STEP_MEASURES)},
        **{key: text_of(result, key) for key in _PEER_TEXTS},
        "loop_lag_ms": _numbers(result.get("loop_lag_ms")),
    }


def _settings(result: Mapping[str, object]) -> dict[str, object]:
    """The run's settings as a worker tells them."""
    told: dict[str, object] = {key: int_of(result, key) for key in _SETTING_COUNTS}
    told["preset"] = text_of(result, "preset")
    return {key: value for key, value in told.items() if value is not None}


def _bits(results: Sequence[Mapping[str, object]], kind: str) -> dict[str, float] | None:
    """Of all that workers have sent of a kind: bits per value as encoded and as travelled, bytes;
    None where nothing was sent."""
    flows = [flows for r in results if isinstance(flows := r.get("traffic"), Mapping)]
    total: Counter[str] = Counter()
    for flow in flows:
        total.update(_numbers(flow.get(kind)))
    if not total["values"]:
        return None
    return {
        "bits_encoded": 8 * total["encoded_bytes"] / total["values"],
        "bits_travelled": 8 * total["payload_bytes"] / total["values"],
        "payload_bytes": total["payload_bytes"],
    }


def _step_times(peers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The workers' median inner steps, by the number of steps that each is the median of."""
    told = [peer for peer in peers if peer["steps_in_flight"] is not None]
    counts = {
        "step_s_idle": [peer["steps"] - peer["steps_in_flight"] for peer in told],
        "step_s_in_flight": [peer["steps_in_flight"] for peer in told],
    }
    return {
        key: sum(count * (peer[key] or 0.0) for count, peer in zip(weights, told, strict=True))
        / sum(weights)
        if sum(weights)
        else None
        for key, weights in counts.items()
    }


def _stalls(results: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Seconds that workers have waited for each peer, over all who waited."""
    total: defaultdict[str, float] = defaultdict(float)
    for result in results:
        for peer, seconds in _numbers(result.get("stall_s_by_peer")).items():
            total[printable(peer)] += seconds
    return {peer: round(seconds, 3) for peer, seconds in sorted(total.items())}


def _longest(records: Sequence[Record]) -> list[dict[str, object]]:
    """The longest waits of all: who, how long, for which round of which fragment, for whom."""
    waits = [
        (stall_s, record.peer, wait)
        for record in records
        for wait in _mappings((record.result or {}).get("longest_stalls"))
        if (stall_s := float_of(wait, "stall_s")) is not None
    ]
    waits.sort(key=lambda wait: -wait[0])
    return [
        {
            "peer": peer,
            "stall_s": stall_s,
            "fragment": int_of(wait, "fragment"),
            "round": int_of(wait, "round"),
            "waited_for": text_of(wait, "waited_for"),
        }
        for stall_s, peer, wait in waits[:_LONGEST]
    ]


def _mappings(value: object) -> list[Mapping[str, object]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(k): number for k in value if (number := float_of(value, k)) is not None}


def _worst(lags: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: max(lag.get(key, 0.0) for lag in lags) for key in sorted(set[str]().union(*lags))}


def _reason(peers: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the run ended: `finished` when at least one worker got there."""
    reasons = [peer["reason"] for peer in peers if peer["reason"]]
    return "finished" if "finished" in reasons else next(iter(reasons), None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _agree(peers: Sequence[Mapping[str, object]]) -> bool | None:
    """Whether all workers that reported hold the same state; None when there are not two."""
    hashes = [(p["anchor_hash"], p["momentum_hash"]) for p in peers if p["anchor_hash"]]
    return len(set(hashes)) == 1 if len(hashes) > 1 else None
