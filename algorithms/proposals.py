"""Plans that reach a target utilization on a link, best first.

The order of preference, and why:
0. averaging gradients in every step (`ddp`), in 16 bits or more: nothing is lost;
1. small H: what a model loses against data-parallel training grows with H first of all;
2. then many bits per parameter: the exact codec before the rounded one;
3. then small tau: at most 5 steps are advised, up to 10 cost less than 0.2 % of the loss. Never
   more than a quarter of H: beyond that too much of a period starts from a stale anchor;
4. then few fragments; then whichever changes least in the plan it is derived from.
A plan stays on the list, behind those of smaller H, as long as it has more bits or a smaller tau
than each of them. One of few bits counts as the plan of four bits that loses about as much, whose H
is larger (`_H_OF_SIGN`, `_H_OF_TOPK`). One that overlaps a whole period (`co2`) is varied as such,
keeps its codecs, and comes behind all others, since that costs much loss
(docs/evidence/streaming.md).

Ref: arXiv:2501.18512 (H and tau).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from murmuration.algorithms.codecs import CODECS, bits_per_value, has_few_bits
from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.utilization import (
    PlanPrediction,
    Workload,
    most_utilization,
    needed_mbps,
    predict,
    rounds_of,
)

MAX_INNER_STEPS = 500
_PERIODS = (
    *(1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 60, 75),
    *(100, 125, 150, 200, 250, 300, 400, 500),
)
_OVERLAPS = (0, 1, 2, 5, 10)
_OVERLAP_OF_PERIOD = 4
_MERGE_ALPHA = 0.5
_LAYERS_A_FRAGMENT = 3
_LEAST_BITS_OF_GRADIENTS = 16
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
    """A plan that reaches the target.

    Args:
        base: the name of the plan that it was derived from. plan: in full.
        fragments: how many there are in fact, the one outside of the layers included.
        bits: per parameter on the wire, mean of contribution and reduction.
        prediction: on the link in question.
    """

    base: str
    plan: Plan
    fragments: int
    bits: float
    prediction: PlanPrediction


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Args: ranked: best first, may be empty. needed_mbps: only then: the speed at which the most
    frugal plan would reach the target; None too if no speed would.
    """

    ranked: tuple[Proposal, ...]
    needed_mbps: float | None = None


def propose(
    target: float,
    bases: Mapping[str, Plan],
    workload: Workload,
    link: Link,
    peers: int,
    *,
    max_inner_steps: int = MAX_INNER_STEPS,
    most: int = 5,
) -> Proposals:
    """Searches H, fragments, tau and codecs.

    Args:
        target: utilization to reach, in 0..1, below 1.
        bases: plans by name; what is not searched stays as it is there. Those that average nothing
            are passed over.
        max_inner_steps: the largest H.
        most: length of the list, at least 2: the best, the last, and some from between, evenly.

    Raises:
        ValueError: the target is no share, or none of the bases can be varied.
    """
    if not 0 < target < 1:
        raise ValueError(f"the target is {target:g}; a utilization is between 0 and 1")
    varied = [
        (name, plan)
        for name, base in bases.items()
        if base.exchange != "none"
        for plan in _with_codecs(base)
    ]
    if not varied:
        raise ValueError("no plan to start from: give one that exchanges something")
    found: list[Proposal] = []
    for name, base in varied:
        for tau in _overlaps(base):
            proposal = _smallest(target, name, base, tau, workload, link, peers, max_inner_steps)
            found += [proposal] if proposal else []
    names = list(bases)
    found.sort(key=lambda p: (*_rank(p), _changes(p.plan, bases[p.base]), names.index(p.base)))
    kept: list[Proposal] = []
    for proposal in found:
        if not any(_replaces(other, proposal) for other in kept):
            kept.append(proposal)
    if kept:
        last = len(kept) - 1
        places = sorted({round(k * last / (most - 1)) for k in range(most)})
        return Proposals(ranked=tuple(kept[place] for place in places))
    needed = [
        mbps
        for _, base in varied
        for tau in _overlaps(base)[-1:]
        for plan in _variants(base, _periods(base, max_inner_steps)[-1], tau, workload)
        if (mbps := needed_mbps(plan, workload, link, peers, target)) is not None
    ]
    return Proposals(ranked=(), needed_mbps=min(needed, default=None))


def bits_per_parameter(plan: Plan) -> float:
    """On the wire, scales and the like included; mean of contribution and reduction."""
    return (bits_per_value(plan.codec) + bits_per_value(plan.reduction_codec)) / 2


def _rank(proposal: Proposal) -> tuple[float, ...]:
    plan = proposal.plan
    return (
        _overlaps_whole(plan),
        _like_steps(plan),
        -proposal.bits,
        plan.overlap_steps,
        proposal.fragments,
    )


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


def _overlaps(base: Plan) -> tuple[int | None, ...]:
    """What tau to try; None is all of H."""
    if base.payload == "gradient":
        return (0,)
    return (None,) if _overlaps_whole(base) else _OVERLAPS


def _periods(base: Plan, most: int) -> tuple[int, ...]:
    """What H to try."""
    if base.payload == "gradient":
        return (1,)
    return tuple(h for h in _PERIODS if h <= most)


def _changes(plan: Plan, base: Plan) -> int:
    return sum(getattr(plan, f.name) != getattr(base, f.name) for f in fields(base))


def _replaces(better: Proposal, other: Proposal) -> bool:
    """Whether nothing speaks for the other one."""
    return (
        _overlaps_whole(better.plan) <= _overlaps_whole(other.plan)
        and _like_steps(better.plan) <= _like_steps(other.plan)
        and better.bits >= other.bits
        and better.plan.overlap_steps <= other.plan.overlap_steps
    )


def _with_codecs(base: Plan) -> Iterator[Plan]:
    """The plan with its own codecs, and with each codec both ways that leaves little out, if the
    plan is not for one of few bits or for an overlap of the whole period."""
    yield base
    if _overlaps_whole(base) or (base.keeps and has_few_bits(base.codec)):
        return
    least = _LEAST_BITS_OF_GRADIENTS if base.payload == "gradient" else 0
    for codec in CODECS:
        own = {base.codec, base.reduction_codec} == {codec.name}
        if not (own or has_few_bits(codec.name) or bits_per_value(codec.name) < least):
            yield replace(base, codec=codec.name, reduction_codec=codec.name)


def _variants(base: Plan, inner_steps: int, tau: int | None, workload: Workload) -> Iterator[Plan]:
    """The base with this H and tau, once for each sensible number of fragments."""
    tau = inner_steps if tau is None else tau
    layers = len(workload.layers)
    counts = [1, -(-layers // _LAYERS_A_FRAGMENT), layers]
    if base.fragments <= layers:
        counts.append(base.fragments)
    # By how many there are in fact; the base's own way of saying it wins.
    by_size = {len(workload.fragments(count, base.pattern)): count for count in counts}
    for size, fragments in sorted(by_size.items()):
        if size > inner_steps:
            continue
        yield replace(
            base,
            inner_steps=inner_steps,
            overlap_steps=tau,
            overlap=base.overlap if tau else "fixed",
            fragments=fragments,
            # Without overlap there are no local steps to keep; with it, half of them are, or all.
            merge_alpha=0.0 if base.keeps or not tau else base.merge_alpha or _MERGE_ALPHA,
        )


def _smallest(
    target: float,
    name: str,
    base: Plan,
    tau: int | None,
    workload: Workload,
    link: Link,
    peers: int,
    max_inner_steps: int,
) -> Proposal | None:
    """The plan of the smallest H, and the fewest fragments, that reaches the target."""
    for inner_steps in _periods(base, max_inner_steps):
        if tau is not None and tau * _OVERLAP_OF_PERIOD > inner_steps:
            continue
        for plan in _variants(base, inner_steps, tau, workload):
            rounds = rounds_of(plan, workload, peers)
            if most_utilization(rounds, workload, link) < target:
                continue
            prediction = predict(plan, workload, link, peers)
            if prediction.utilization >= target:
                return Proposal(
                    base=name,
                    plan=plan,
                    fragments=len(rounds.fragments),
                    bits=bits_per_parameter(plan),
                    prediction=prediction,
                )
    return None
