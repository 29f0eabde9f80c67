"""Presets that reach a target utilization on a link, each at its smallest H, best first.

What a model loses against data-parallel training grows with H first of all, so the smallest H
comes first. Averaging gradients in every step (`ddp`) loses nothing. A plan of few bits counts as
the plan of four bits that loses about as much, whose H is larger (`_H_OF_SIGN`, `_H_OF_TOPK`). One
that overlaps a whole period (`co2`) comes behind all others, since that costs much loss
(docs/evidence/streaming.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from murmuration.algorithms.codecs import bits_per_value, has_few_bits
from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.utilization import PlanPrediction, Workload, needed_mbps, predict

PERIODS = (
    *(1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 60, 75),
    *(100, 125, 150, 200, 250, 300, 400, 500),
)
# How many times its H a plan of few bits counts as: `streaming` with that H loses as much. The
# figures are those of docs/evidence/bytes.md after 2,400 steps. `streaming` has only H 100 there,
# so its loss is taken to grow with H as that of `onebit` does: straight lines over log H between H
# 7, 28 and 140. Then `streaming` with H 100 is `onebit` with H 85 (AdamW) or 71 (Muon), and
# `sparse` with H 10 is `streaming` with H 22 or 52. That is 1.17 or 1.42 times the H, and 2.2 or
# 5.2 times; these are the geometric means. Signs have a bit or more for each parameter, top-k has
# less. What few bits cost does not go away with H, and no H below 7 was measured: a shorter one
# counts as that.
_H_OF_SIGN, _H_OF_TOPK = 1.3, 3.4
_LEAST_BITS_OF_SIGN, _LEAST_H_OF_FEW_BITS = 1, 7


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan that reaches the target. Args: preset: it is of; prediction: on the link."""

    preset: str
    plan: Plan
    prediction: PlanPrediction


def propose(
    target: float,
    plans: Mapping[str, Sequence[Plan]],
    workload: Workload,
    link: Link,
    peers: int,
) -> list[Proposal]:
    """The first plan of each preset that reaches the target, best first; may be empty.

    Args:
        target: utilization to reach, in 0..1, below 1.
        plans: by preset, the smallest H first. What averages nothing is passed over, and so is a
            plan that does not fit the model.
    """
    found = []
    for preset, of_preset in plans.items():
        for plan, prediction in _predictions(of_preset, workload, link, peers):
            if prediction.utilization >= target:
                found.append(Proposal(preset=preset, plan=plan, prediction=prediction))
                break
    return sorted(found, key=lambda each: (_overlaps_whole(each.plan), _like_steps(each.plan)))


def least_mbps(
    target: float,
    plans: Mapping[str, Sequence[Plan]],
    workload: Workload,
    link: Link,
    peers: int,
) -> float | None:
    """The lowest speed at which a preset with its largest H reaches the target. Args: as `propose`.

    Returns: in Mbit/s; None where no speed is enough.
    """
    needed = [
        needed_mbps(fitting[-1], workload, link, peers, target)
        for of_preset in plans.values()
        if (fitting := [plan for plan, _ in _predictions(of_preset, workload, link, peers)])
    ]
    return min((mbps for mbps in needed if mbps is not None), default=None)


def bits_per_parameter(plan: Plan) -> float:
    """On the wire, scales and the like included; mean of contribution and reduction."""
    return (bits_per_value(plan.codec) + bits_per_value(plan.reduction_codec)) / 2


def _predictions(
    plans: Sequence[Plan], workload: Workload, link: Link, peers: int
) -> Iterator[tuple[Plan, PlanPrediction]]:
    for plan in plans:
        if plan.exchange != "none":
            try:
                yield plan, predict(plan, workload, link, peers)
            except ValueError:  # more fragments than layers, or than H
                continue


def _like_steps(plan: Plan) -> float:
    """The H of a plan of four bits or more that loses about as much."""
    if plan.payload == "gradient":
        return 0
    if not has_few_bits(plan.codec):
        return plan.inner_steps
    signs = bits_per_value(plan.codec) >= _LEAST_BITS_OF_SIGN
    measured = max(plan.inner_steps, _LEAST_H_OF_FEW_BITS)
    return measured * (_H_OF_SIGN if signs else _H_OF_TOPK)


def _overlaps_whole(plan: Plan) -> bool:
    """Whether a round takes the whole period by intention."""
    return plan.overlap_steps == plan.inner_steps
