"""The final report: the results of all workers, as one JSON document."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from murmuration.coordinator.records import COUNTS, Record
from murmuration.protos.events import Curve, costliest, float_of, int_of, printable, text_of
from murmuration.worker.views.summary import map_of, maps_of

Report = dict[str, Any]

_LONGEST = 5
_SETTING_COUNTS = ("inner_steps", "seed", "params", "fragments")
_PEER_COUNTS = (
    "tokens", "payload_bytes_sent", "payload_bytes_received", "ddp_bytes", "probe_bytes_sent",
    "probe_bytes_received",
)  # fmt: skip
_MEANS = (
    "compute_s", "stall_s", "wall_s", "compute_utilization", "val_loss", "val_loss_error",
    "blocked_s", "spread",
)  # fmt: skip
_PEER_TEXTS = ("anchor_hash", "momentum_hash", "reason", "checkpoint")
_STAGE_COUNTS = (
    "visits", "repeated", "rerouted", "skipped", "dropped", "lost", "other_snapshots", "discarded",
)  # fmt: skip


def build_report(
    records: Sequence[Record], *, settings: Mapping[str, object], elapsed_s: float
) -> Report:
    """Puts the workers' results together.

    `val_loss val_loss_error val_metrics compute_s stall_s wall_s compute_utilization` are means
    over the workers that reported them. They evaluate on the same batches, so `val_loss_error` is
    the standard error of each. `rounds_completed` is the most that one worker saw, `rounds_failed`
    the sum over workers. The mean that ends a run is part of `rounds_completed` and `stall_s`, and
    stands apart in `final_mean_rounds final_mean_stall_s`. `spread` is how far replicas in pairs
    were from their group's mean when they last met, relative to its size. `loop_lag_ms` is the
    worst worker's. `bytes_ratio` says how many times more DDP would have sent. A worker that ended
    without a result stands in `peers` with what was last heard of it, its counts null where it
    could not be asked. What differs with a model in stages: see `staged_figures`. Args: settings:
    preset, steps, inner_steps and seed as typed, where no worker has reported them; link and
    link_bytes (sent and received of each worker) of shaped links; reporter, whose folder this is:
    its checkpoint is the one to name; elapsed_s: from the command's start to its end."""
    told, peers = _Results(records), [_peer(record) for record in records]
    known = dict(settings) | told.settings()
    counts = [peer["bytes_sent"] for peer in peers if peer["anchor_hash"]]
    counted = [float(count) for count in counts if count is not None]
    own_first = sorted(peers, key=lambda peer: peer["peer"] != known.get("reporter"))
    sent, ddp, reasons = _mean(counted), told.mean("ddp_bytes"), told.texts("reason")
    lags = [peer["loop_lag_ms"] for peer in peers if peer["loop_lag_ms"]]
    lag_keys = sorted(set[str]().union(*lags))
    return {
        "preset": known.get("preset"),
        "workers": len(records),
        "steps": max((record.steps or 0 for record in records), default=0) or known.get("steps"),
        "step": max((record.step for record in records), default=0),
        **{key: known.get(key) for key in _SETTING_COUNTS},
        "loss_unit": told.first("loss_unit"),
        **{key: known.get(key) for key in ("link", "link_bytes")},  # None on loopback
        **{key: told.mean(key) for key in _MEANS},
        "elapsed_s": round(elapsed_s, 3),
        "rounds_completed": max((record.rounds_completed or 0 for record in records), default=0),
        "rounds_failed": sum(record.rounds_failed or 0 for record in records),
        "steps_lost": sum(record.steps_lost or 0 for record in records),
        "most_overlap_steps": told.most("most_overlap_steps"),
        "bytes_sent_per_worker": sent,
        "final_mean_bytes_per_worker": told.mean("final_mean_bytes"),
        "final_mean_stall_s": told.mean("final_mean_stall_s"),
        "final_mean_rounds": told.most("final_mean_rounds"),
        "ddp_bytes_per_worker": ddp,
        "bytes_ratio": ddp / sent if ddp and sent else None,
        "bits_per_value": {
            kind: _bits(told.sums(flows.get(kind) for flows in told.maps("traffic")))
            for kind in ("contributions", "reductions", "final_mean")
        },
        "stall_s_by_peer": {
            printable(peer): round(stall_s, 3)
            for peer, stall_s in sorted(told.sums(told.maps("stall_s_by_peer")).items())
        },
        "longest_stalls": _longest(records),
        "verdicts": costliest(record.verdicts for record in records),
        "warnings": list(dict.fromkeys(text for each in records for text in each.warnings)),
        "hashes_agree": told.agree(),
        "reason": "finished" if "finished" in reasons else next(iter(reasons), None),
        "loop_lag_ms": {key: max(lag.get(key, 0.0) for lag in lags) for key in lag_keys},
        "sample": told.first("sample"),
        "checkpoint": next((p["checkpoint"] for p in own_first if p["checkpoint"]), None),
        "loss_png": None,
        "peers": peers,
        "val_metrics": _mean_of_each([_numbers(found) for found in told.maps("val_metrics")]),
        "val_loss_curve": _mean_curve(record.validation_curve() for record in records),
        "train_loss_curve": _mean_curve(record.loss_curve() for record in records),
        **staged_figures(records),
    }


def _mean_curve(curves: Iterable[Curve]) -> Curve:
    """Per step the mean over the workers that have a value there."""
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for step, loss in chain.from_iterable(curves):
        by_step[step].append(loss)
    return [(step, sum(losses) / len(losses)) for step, losses in sorted(by_step.items())]


class _Results:
    """The reports of workers at their ends; nothing of those that gave none."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.all = [record.result for record in records if record.result is not None]

    def floats(self, key: str) -> list[float]:
        return [value for each in self.all if (value := float_of(each, key)) is not None]

    def ints(self, key: str) -> list[int]:
        return [value for each in self.all if (value := int_of(each, key)) is not None]

    def pairs(self, key: str, other: str) -> list[tuple[int, int]]:
        """Both figures of each report that has the one, and of the other more than 0."""
        return [
            (value, more)
            for each in self.all
            if (value := int_of(each, key)) is not None and (more := int_of(each, other))
        ]

    def texts(self, key: str) -> list[str]:
        return [text for each in self.all if (text := text_of(each, key))]

    def maps(self, key: str) -> list[Mapping[str, Any]]:
        return [map_of(each, key) for each in self.all]

    def mean(self, key: str) -> float | None:
        return _mean(self.floats(key))

    def most(self, key: str) -> int:
        return max(self.ints(key), default=0)

    def first(self, key: str) -> str | None:
        return next(iter(self.texts(key)), None)

    def sums(self, maps: Iterable[object]) -> dict[str, float]:
        """Over these, of each number in them."""
        total: defaultdict[str, float] = defaultdict(float)
        for each in maps:
            for key, value in _numbers(each).items():
                total[key] += value
        return dict(total)

    def settings(self) -> dict[str, object]:
        """The run's settings as the workers tell them."""
        told: dict[str, Sequence[object]] = {key: self.ints(key) for key in _SETTING_COUNTS}
        told |= {"preset": self.texts("preset"), "steps": self.ints("run_steps")}
        return {key: values[-1] for key, values in told.items() if values}

    def agree(self) -> bool | None:
        """Tells whether all hold the same state; None when there are not two."""
        hashes = [
            (anchor, text_of(each, "momentum_hash"))
            for each in self.all
            if (anchor := text_of(each, "anchor_hash"))
        ]
        return len(set(hashes)) == 1 if len(hashes) > 1 else None


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
        **{key: float_of(result, key) for key in _MEANS},
        **{key: text_of(result, key) for key in _PEER_TEXTS},
        "loop_lag_ms": _numbers(result.get("loop_lag_ms")),
    }


def _bits(flow: Mapping[str, float]) -> dict[str, float] | None:
    """Bits per value as encoded and as travelled, and bytes; None where nothing was sent."""
    if not (values := flow.get("values")):
        return None
    encoded, payload = flow.get("encoded_bytes", 0.0), flow.get("payload_bytes", 0.0)
    return {
        "bits_encoded": 8 * encoded / values,
        "bits_travelled": 8 * payload / values,
        "payload_bytes": payload,
    }


def _longest(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The longest waits of all: of which peer, how long, for which round, for which peer."""
    waits: list[dict[str, Any]] = [
        {
            "peer": record.peer,
            "stall_s": stall_s,
            "fragment": int_of(wait, "fragment"),
            "round": int_of(wait, "round"),
            "waited_for": text_of(wait, "waited_for"),
        }
        for record in records
        for wait in maps_of(record.result or {}, "longest_stalls")
        if (stall_s := float_of(wait, "stall_s")) is not None
    ]
    return sorted(waits, key=lambda wait: -wait["stall_s"])[:_LONGEST]


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(k): number for k in value if (number := float_of(value, k)) is not None}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _mean_of_each(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: fmean(each[name] for each in found if name in each) for name in names}


def staged_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Figures that take the place of a whole model's, and `stages`; empty where nothing is cut.

    `params` are the whole model's, None unless every stage has reported; `hashes_agree` says
    whether each stage's replicas do; `bytes_ratio` compares what the exchange within the stages has
    sent with DDP within them; `checkpoint` is that of the whole model. In `stages`, `iteration_s`
    is the mean of the workers' medians, `iteration_p95_s` that of the slowest,
    `activation_bytes_per_iteration` is what a worker has sent of activations and gradients on
    average; the peak in flight is that of the worker nearest to its limit. `counts` are sums:
    `unconfirmed` of workers that have not reported, the others of those that have. `rest` are
    shares of the time from first to last inner step in which nothing was computed, on average:
    waiting for microbatches, for rounds, and the rest. `moves` and `rebuilds` count the peers that
    went to another stage and the stages that they rebuilt."""
    if all(record.stage is None for record in records):
        return {}
    told, by_stage = _Results(records), _by_stage(records)
    count = max(told.most("stages"), 1 + max(stage["stage"] for stage in by_stage))
    known = [stage["params"] for stage in by_stage if stage["params"] is not None]
    agreements = [stage["hashes_agree"] for stage in by_stage if stage["hashes_agree"] is not None]
    exchanged, ddp = told.mean("exchange_bytes_sent"), told.mean("ddp_bytes")
    activations = [total / steps for total, steps in told.pairs("activation_bytes_sent", "steps")]
    in_flight = told.pairs("in_flight_peak_bytes", "in_flight_limit_bytes")
    peak, limit = max(in_flight, key=lambda pair: pair[0] / pair[1], default=(None, None))
    summed = told.sums(told.maps("stage_counts"))
    return {
        "params": sum(known) if len(known) == count else None,
        "hashes_agree": all(agreements) if agreements else None,
        "bytes_ratio": ddp / exchanged if ddp and exchanged else None,
        "checkpoint": told.first("assembled"),
        "stages": {
            "count": count,
            "routing": told.first("routing"),
            "skip": told.mean("skip"),
            "microbatches": max(told.ints("microbatches"), default=0) if told.all else None,
            "rest": _rest(told),
            "iteration_s": told.mean("iteration_s"),
            "iteration_p95_s": max(told.floats("iteration_p95_s"), default=None),
            "activation_bytes_per_iteration": _mean(activations),
            "exchange_bytes_sent_per_worker": exchanged,
            "in_flight_peak_bytes": peak,
            "in_flight_limit_bytes": limit,
            "counts": {
                **{key: int(summed.get(key, 0)) for key in _STAGE_COUNTS},
                "unconfirmed": sum(record.unconfirmed for record in records),
            },
            "moves": sum(record.moves for record in records),
            "rebuilds": sum(record.rebuilds for record in records),
            "by_stage": by_stage,
        },
    }


def _by_stage(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Figures of each stage in order; `hashes_agree` is None without two that reported."""
    return [
        {
            "stage": stage,
            "replicas": len(here),
            "reported": len(told.texts("anchor_hash")),
            "params": next((params for params in told.ints("params") if params), None),
            "hashes_agree": told.agree(),
            "spread": told.mean("spread"),
        }
        for stage in sorted({record.stage for record in records if record.stage is not None})
        for here in [[record for record in records if record.stage == stage]]
        for told in [_Results(here)]
    ]


def _rest(told: _Results) -> dict[str, float] | None:
    """The shares of the time that was not computed in; None where nobody has reported it."""
    shares = []
    for result in told.all:
        reported = [
            float_of(result, key)
            for key in ("visits_wait_s", "rounds_wait_s", "compute_s", "wall_s")
        ]
        visits_s, rounds_s, compute_s, wall_s = (value or 0.0 for value in reported)
        if None not in reported and wall_s > 0:
            other_s = max(0.0, wall_s - compute_s - visits_s - rounds_s)  # rounded, each by itself
            times = {"microbatches": visits_s, "rounds": rounds_s, "other": other_s}
            shares.append({key: time_s / wall_s for key, time_s in times.items()})
    return _mean_of_each(shares) or None
