"""What a report says of a model in stages, beside or instead of what it says of a whole one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from coordinator.rendezvous.records import Record, float_of, int_of, text_of

_COUNTS = (
    "visits",
    "repeated",
    "rerouted",
    "skipped",
    "dropped",
    "lost",
    "other_schedules",
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
    slowest, `visit_bytes_per_iteration` is what a worker has sent of activations and gradients, on
    average; the peak in flight is that of the worker nearest to its limit, and `counts` are sums:
    `unconfirmed` of workers that have not reported, the others of those that have.
    `rest` are shares of the time from first to last inner step in which nothing was computed, on
    average: waiting for microbatches, waiting for rounds, and what is not told apart. `moves` and
    `rebuilds` count the peers that went to another stage and the stages that they made anew.
    """
    if all(record.stage is None for record in records):
        return {}
    results = [record.result for record in records if record.result is not None]
    by_stage = _by_stage(records)
    count = max((int_of(r, "stages") or 0 for r in results), default=0)
    count = max(count, 1 + max(stage["stage"] for stage in by_stage))
    known = [stage["params"] for stage in by_stage if stage["params"] is not None]
    told = [stage["hashes_agree"] for stage in by_stage if stage["hashes_agree"] is not None]
    exchanged = _mean(results, "exchange_bytes_sent")
    ddp = _mean(results, "ddp_bytes")
    return {
        "params": sum(known) if len(known) == count else None,
        "hashes_agree": all(told) if told else None,
        "bytes_ratio": ddp / exchanged if ddp and exchanged else None,
        "checkpoint": next((path for r in results if (path := text_of(r, "assembled"))), None),
        "stages": {
            "count": count,
            "routing": next((name for r in results if (name := text_of(r, "routing"))), None),
            "skip": _mean(results, "skip"),
            "microbatches": max((int_of(r, "microbatches") or 0 for r in results), default=None),
            "rest": _rest(results),
            "iteration_s": _mean(results, "iteration_s"),
            "iteration_p95_s": max(_floats(results, "iteration_p95_s"), default=None),
            "visit_bytes_per_iteration": _per_iteration(results),
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
                "spread": _mean(results, "spread"),
            }
        )
    return stages


def _rest(results: Sequence[Result]) -> dict[str, float] | None:
    """Where the time went that was not computed in, by share; None where nobody has told."""
    shares: dict[str, list[float]] = {"microbatches": [], "rounds": [], "other": []}
    for result in results:
        told = [float_of(result, key) for key in _REST]
        visits_s, rounds_s, compute_s, wall_s = (value or 0.0 for value in told)
        if None in told or wall_s <= 0:
            continue
        other_s = max(0.0, wall_s - compute_s - visits_s - rounds_s)  # rounded, each by itself
        for share, seconds in zip(shares.values(), (visits_s, rounds_s, other_s), strict=True):
            share.append(seconds / wall_s)
    return {key: fmean(each) for key, each in shares.items()} if shares["other"] else None


def _per_iteration(results: Sequence[Result]) -> float | None:
    """Bytes of visits that a worker has sent in an iteration, on average."""
    told = [(int_of(r, "visit_bytes_sent"), int_of(r, "steps")) for r in results]
    means = [sent / steps for sent, steps in told if sent is not None and steps]
    return fmean(means) if means else None


def _fullest(results: Sequence[Result]) -> dict[str, int | None]:
    """Peak and limit of the worker nearest to its limit."""
    told = [
        (int_of(r, "in_flight_peak_bytes"), int_of(r, "in_flight_limit_bytes")) for r in results
    ]
    pairs = [(peak, limit) for peak, limit in told if peak is not None and limit]
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


def _mean(results: Sequence[Result], key: str) -> float | None:
    values = _floats(results, key)
    return fmean(values) if values else None
