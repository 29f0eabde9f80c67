"""The workers' results as one report, under murmur's keys where murmur has them."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

Report = dict[str, Any]

_MEANS = ("val_loss", "wall_s", "compute_s", "stall_s", "compute_utilization")


def combine(settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Report:
    """Puts the results of one run together.

    Means are over the workers; `rounds_completed` is the most that one of them saw, `rounds_failed`
    the sum, `rounds_partial` the most rounds that were said to be complete though their mean was
    not everybody's. `stall_per_round_s` is the mean over all rounds and workers, the first round
    with its connecting included, `stall_per_round_median_s` their median. `val_loss_spread` is the
    largest difference between two workers: 0 or rounding, unless a round passed somebody by.

    Args:
        settings: of the run; copied into the report.
        results: one per worker.
    """
    workers, steps = len(results), settings["steps"]
    params = results[0]["params"]
    sent = mean(result["bytes_sent"] for result in results)
    ddp = 2 * (workers - 1) / workers * 4 * params * steps
    stalls_s = [stall_s for result in results for stall_s in result["stalls_s"]]
    losses = [result["val_loss"] for result in results]
    hashes = {(result["anchor_hash"], result["momentum_hash"]) for result in results}
    return {
        **settings,
        "system": results[0]["system"],
        "params": params,
        **{key: mean(result[key] for result in results) for key in _MEANS},
        "val_loss_spread": max(losses) - min(losses),
        "stall_per_round_s": mean(stalls_s) if stalls_s else 0.0,
        "stall_per_round_median_s": median(stalls_s) if stalls_s else 0.0,
        "rounds_completed": max(result["rounds_completed"] for result in results),
        "rounds_failed": sum(result["rounds_failed"] for result in results),
        "rounds_partial": max(result["rounds_partial"] for result in results),
        "bytes_sent_per_worker": sent,
        "bytes_received_per_worker": mean(result["bytes_received"] for result in results),
        "bytes_counted_on": sorted({result["bytes_counted_on"] for result in results}),
        "ddp_bytes_per_worker": round(ddp),
        "bytes_ratio": ddp / sent if sent else None,
        "hashes_agree": len(hashes) == 1 if workers > 1 else None,
        "peers": list(results),
    }
