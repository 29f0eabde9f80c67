"""The final report: the results of all workers, as one JSON document."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from coordinator.rendezvous.records import COUNTS, Record
from protos.events import Curve, costliest, float_of, int_of, printable, text_of
from protos.files import write_atomically

_LONGEST = 5

Report = dict[str, Any]

_LINK_KEYS = ("link", "link_means", "link_bytes")  # None where workers were on loopback
_SETTING_COUNTS = ("inner_steps", "seed", "params", "fragments")
_PEER_COUNTS = (
    "tokens",
    "payload_bytes_sent",
    "payload_bytes_received",
    "payload_bytes_per_round",
    "ddp_bytes",
    "probe_bytes_sent",
    "probe_bytes_received",
    "steps_in_flight",
)
_PEER_MEASURES = (
    "compute_s",
    "stall_s",
    "wall_s",
    "compute_utilization",
    "val_loss",
    "val_loss_error",
)
_STEP_MEASURES = ("step_s_idle", "step_s_in_flight")
_MEAN_MEASURES = (*_PEER_MEASURES, "blocked_s", "spread")
_PEER_TEXTS = ("anchor_hash", "momentum_hash", "reason", "checkpoint")


def build_report(
    records: Sequence[Record],
    *,
    settings: Mapping[str, object],
    elapsed_s: float,
    under_way: bool = False,
) -> Report:
    """Puts the workers' results together.

    `val_loss val_loss_error val_metrics compute_s stall_s wall_s compute_utilization` are means
    over the workers that reported them. They evaluate on the same batches, so `val_loss_error` is
    the standard error of each. `step_s_idle step_s_in_flight` are the workers' median inner steps
    while no round is on its way and while one is, weighted by the number of such steps.
    `rounds_completed` is the most that one worker saw, `rounds_failed` the sum over workers. The
    mean that ends a run is part of `rounds_completed` and `stall_s`, and stands apart in
    `final_mean_rounds final_mean_stall_s`. `spread` is how far replicas in pairs were from their
    group's mean when they last met, relative to its size.
    `loop_lag_ms` is the worst worker's. `bytes_ratio` says how many times more DDP would have sent.
    A worker that ended without a result stands in `peers` with what was last heard of it, its
    counts null where it could not be asked. What
    differs with a model in stages: see `staged_figures`.

    Args:
        records: one per worker.
        settings: preset, steps, inner_steps and seed as typed, where no worker has reported them;
            link, link_means and link_bytes (sent and received of each worker) of shaped links;
            reporter, the worker whose folder this is: its checkpoint is the one to name.
        elapsed_s: from the command's start to its end.
        under_way: the run goes on: bytes are those of all workers so far.
    """
    results = [record.result for record in records if record.result is not None]
    known = dict(settings)
    for result in results:
        known |= _settings(result)
    peers = [_peer(record) for record in records]
    counted = [peer for peer in peers if peer["anchor_hash"] or under_way]
    own_first = sorted(peers, key=lambda peer: peer["peer"] != known.get("reporter"))
    sent = _mean([float(p["bytes_sent"]) for p in counted if p["bytes_sent"] is not None])
    ddp = _mean([float(peer["ddp_bytes"]) for peer in peers if peer["ddp_bytes"] is not None])
    return {
        "under_way": under_way,
        "preset": known.get("preset"),
        "workers": len(records),
        "steps": max((record.steps or 0 for record in records), default=0) or known.get("steps"),
        "step": max((record.step for record in records), default=0),
        "inner_steps": known.get("inner_steps"),
        "seed": known.get("seed"),
        "params": known.get("params"),
        "fragments": known.get("fragments"),
        "loss_unit": next((text_of(r, "loss_unit") for r in results if "loss_unit" in r), None),
        **{key: known.get(key) for key in _LINK_KEYS},
        **{key: _mean([p[key] for p in peers if p[key] is not None]) for key in _MEAN_MEASURES},
        **_step_times(peers),
        "elapsed_s": round(elapsed_s, 3),
        "rounds_completed": max((record.rounds_completed or 0 for record in records), default=0),
        "rounds_failed": sum(record.rounds_failed or 0 for record in records),
        "steps_lost": sum(record.steps_lost or 0 for record in records),
        "most_overlap_steps": max(
            (int_of(r, "most_overlap_steps") or 0 for r in results), default=0
        ),
        "bytes_sent_per_worker": sent,
        "final_mean_bytes_per_worker": _mean_of(results, "final_mean_bytes"),
        "final_mean_stall_s": _mean_of(results, "final_mean_stall_s"),
        "final_mean_rounds": max((int_of(r, "final_mean_rounds") or 0 for r in results), default=0),
        "ddp_bytes_per_worker": ddp,
        "bytes_ratio": ddp / sent if ddp and sent else None,
        "bits_per_value": {
            kind: _bits(results, kind) for kind in ("contributions", "reductions", "final_mean")
        },
        "stall_s_by_peer": _stalls(results),
        "longest_stalls": _longest(records),
        "verdicts": costliest(record.verdicts for record in records),
        "warnings": list(dict.fromkeys(text for each in records for text in each.warnings)),
        "hashes_agree": _agree(peers),
        "reason": _reason(peers),
        "loop_lag_ms": _worst([p["loop_lag_ms"] for p in peers if p["loop_lag_ms"]]),
        "sample": next((s for r in results if (s := text_of(r, "sample"))), None),
        "checkpoint": next((p["checkpoint"] for p in own_first if p["checkpoint"]), None),
        "loss_png": None,
        "peers": peers,
        "val_metrics": _mean_of_each([_numbers(result.get("val_metrics")) for result in results]),
        "val_loss_curve": mean_curve([record.validation_curve() for record in records]),
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
        **{key: getattr(record, key) for key in COUNTS},
        **{key: int_of(result, key) for key in _PEER_COUNTS},
        **{key: float_of(result, key) for key in (*_MEAN_MEASURES, *_STEP_MEASURES)},
        **{key: text_of(result, key) for key in _PEER_TEXTS},
        "loop_lag_ms": _numbers(result.get("loop_lag_ms")),
    }


def _settings(result: Mapping[str, object]) -> dict[str, object]:
    """The run's settings as a worker tells them."""
    reported: dict[str, object] = {key: int_of(result, key) for key in _SETTING_COUNTS}
    reported["preset"] = text_of(result, "preset")
    return {key: value for key, value in reported.items() if value is not None}


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
    reporting = [peer for peer in peers if peer["steps_in_flight"] is not None]
    counts = {
        "step_s_idle": [peer["steps"] - peer["steps_in_flight"] for peer in reporting],
        "step_s_in_flight": [peer["steps_in_flight"] for peer in reporting],
    }
    return {
        key: sum(count * (peer[key] or 0.0) for count, peer in zip(weights, reporting, strict=True))
        / sum(weights)
        if sum(weights)
        else None
        for key, weights in counts.items()
    }


def _stalls(results: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Seconds that workers have waited for each peer, over all that waited."""
    total: defaultdict[str, float] = defaultdict(float)
    for result in results:
        for peer, seconds in _numbers(result.get("stall_s_by_peer")).items():
            total[printable(peer)] += seconds
    return {peer: round(seconds, 3) for peer, seconds in sorted(total.items())}


def _longest(records: Sequence[Record]) -> list[dict[str, object]]:
    """The longest waits of all: of which peer, how long, for which round, for which peer."""
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
    return fmean(values) if values else None


def _mean_of_each(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: fmean(each[name] for each in found if name in each) for name in names}


def _agree(peers: Sequence[Mapping[str, object]]) -> bool | None:
    """Whether all workers that reported hold the same state; None when there are not two."""
    hashes = [(p["anchor_hash"], p["momentum_hash"]) for p in peers if p["anchor_hash"]]
    return len(set(hashes)) == 1 if len(hashes) > 1 else None


_COUNTS = (
    "visits",
    "repeated",
    "rerouted",
    "skipped",
    "dropped",
    "lost",
    "other_snapshots",
    "discarded",
)
_REST = ("visits_wait_s", "rounds_wait_s", "compute_s", "wall_s")

Result = Mapping[str, object]


def staged_figures(records: Sequence[Record]) -> dict[str, Any]:
    """What takes the place of a whole model's figures, and `stages`; empty where nothing is cut.

    `params` are the whole model's, None unless every stage has reported; `hashes_agree` says
    whether each stage's replicas do; `bytes_ratio` compares what the exchange within the stages has
    sent with DDP within them; `checkpoint` is that of the whole model.

    In `stages`, `iteration_s` is the mean of the workers' medians, `iteration_p95_s` that of the
    slowest, `activation_bytes_per_iteration` is what a worker has sent of activations and their
    gradients, on average; the peak in flight is that of the worker nearest to its limit. `counts`
    are sums: `unconfirmed` of workers that have not reported, the others of those that have.
    `rest` are shares of the time from first to last inner step in which nothing was computed, on
    average: waiting for microbatches, waiting for rounds, and the rest. `moves` and
    `rebuilds` count the peers that went to another stage and the stages that they rebuilt.
    """
    if all(record.stage is None for record in records):
        return {}
    results = [record.result for record in records if record.result is not None]
    by_stage = _by_stage(records)
    count = max((int_of(r, "stages") or 0 for r in results), default=0)
    count = max(count, 1 + max(stage["stage"] for stage in by_stage))
    known = [stage["params"] for stage in by_stage if stage["params"] is not None]
    agreements = [stage["hashes_agree"] for stage in by_stage if stage["hashes_agree"] is not None]
    exchanged = _mean_of(results, "exchange_bytes_sent")
    ddp = _mean_of(results, "ddp_bytes")
    return {
        "params": sum(known) if len(known) == count else None,
        "hashes_agree": all(agreements) if agreements else None,
        "bytes_ratio": ddp / exchanged if ddp and exchanged else None,
        "checkpoint": next((path for r in results if (path := text_of(r, "assembled"))), None),
        "stages": {
            "count": count,
            "routing": next((name for r in results if (name := text_of(r, "routing"))), None),
            "skip": _mean_of(results, "skip"),
            "microbatches": max((int_of(r, "microbatches") or 0 for r in results), default=None),
            "rest": _rest(results),
            "iteration_s": _mean_of(results, "iteration_s"),
            "iteration_p95_s": max(_floats(results, "iteration_p95_s"), default=None),
            "activation_bytes_per_iteration": _per_iteration(results),
            "exchange_bytes_sent_per_worker": exchanged,
            **_fullest(results),
            "counts": {
                **_counts(results),
                "unconfirmed": sum(record.unconfirmed for record in records),
            },
            "moves": sum(record.moves for record in records),
            "rebuilds": sum(record.rebuilds for record in records),
            "by_stage": by_stage,
        },
    }


def _by_stage(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Of each stage in order: replicas, how many reported, parameters of one, whether the anchors
    and momenta are equal (None when there are not two), and in pairs their mean spread."""
    stages = []
    for stage in sorted({record.stage for record in records if record.stage is not None}):
        here = [record for record in records if record.stage == stage]
        results = [record.result for record in here if record.result is not None]
        hashes = [(text_of(r, "anchor_hash"), text_of(r, "momentum_hash")) for r in results]
        hashes = [pair for pair in hashes if pair[0]]
        stages.append(
            {
                "stage": stage,
                "replicas": len(here),
                "reported": len(hashes),
                "params": next((n for r in results if (n := int_of(r, "params"))), None),
                "hashes_agree": len(set(hashes)) == 1 if len(hashes) > 1 else None,
                "spread": _mean_of(results, "spread"),
            }
        )
    return stages


def _rest(results: Sequence[Result]) -> dict[str, float] | None:
    """Where the time went that was not computed in, by share; None where nobody has reported it."""
    shares: dict[str, list[float]] = {"microbatches": [], "rounds": [], "other": []}
    for result in results:
        reported = [float_of(result, key) for key in _REST]
        visits_s, rounds_s, compute_s, wall_s = (value or 0.0 for value in reported)
        if None in reported or wall_s <= 0:
            continue
        other_s = max(0.0, wall_s - compute_s - visits_s - rounds_s)  # rounded, each by itself
        for share, seconds in zip(shares.values(), (visits_s, rounds_s, other_s), strict=True):
            share.append(seconds / wall_s)
    return {key: fmean(each) for key, each in shares.items()} if shares["other"] else None


def _per_iteration(results: Sequence[Result]) -> float | None:
    """Bytes of visits that a worker has sent in an iteration, on average."""
    reported = [(int_of(r, "activation_bytes_sent"), int_of(r, "steps")) for r in results]
    means = [sent / steps for sent, steps in reported if sent is not None and steps]
    return fmean(means) if means else None


def _fullest(results: Sequence[Result]) -> dict[str, int | None]:
    """Peak and limit of the worker nearest to its limit."""
    reported = [
        (int_of(r, "in_flight_peak_bytes"), int_of(r, "in_flight_limit_bytes")) for r in results
    ]
    pairs = [(peak, limit) for peak, limit in reported if peak is not None and limit]
    peak, limit = max(pairs, key=lambda pair: pair[0] / pair[1], default=(None, None))
    return {"in_flight_peak_bytes": peak, "in_flight_limit_bytes": limit}


def _counts(results: Sequence[Result]) -> dict[str, int]:
    """Sums over the workers."""
    total: Counter[str] = Counter()
    for result in results:
        counts = result.get("stage_counts")
        if isinstance(counts, Mapping):
            total.update({key: int_of(counts, key) or 0 for key in _COUNTS})
    return {key: total[key] for key in _COUNTS}


def _floats(results: Sequence[Result], key: str) -> list[float]:
    return [value for r in results if (value := float_of(r, key)) is not None]


def _mean_of(results: Sequence[Result], key: str) -> float | None:
    return _mean(_floats(results, key))
