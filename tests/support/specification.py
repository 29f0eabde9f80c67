"""The whole algorithm with all peers in one process: the executable specification.

Real workers must end with the same anchors and outer momenta, bit for bit, when every peer is in
every round and the codecs are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.diloco import (
    carry_over,
    go_on_with_integers,
    keep_unsent,
    mean_in_order,
    merge,
    pseudo_gradient,
    take_integers,
    take_mean,
)
from murmuration.algorithms.draws import groups, membership_id
from murmuration.algorithms.fragments import Fragment
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.robust import (
    NORM_LIMIT,
    aggregate,
    norm,
    norm_factors,
    norm_of_parts,
    norm_ratios,
    taken_out,
)
from murmuration.algorithms.schedule import Due, Schedule


def applies(schedule: Schedule, step: int) -> tuple[Due, ...]:
    """The earlier rounds to apply after `step`, before those sent there: those sent tau steps ago,
    none with tau = 0. At the last step everything that is still in flight is applied."""
    tau = schedule.overlap_steps
    window = range(tau, 0, -1) if step == schedule.steps or tau == 0 else (tau,)
    return tuple(due for back in window for due in schedule.sends(step - back))


class TrainedReplica(Protocol):
    """One peer's model, inner optimizer and samples."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The local parameters; `train` writes into them."""
        ...

    def backward(self, step: int) -> Mapping[str, Tensor]:
        """Gradients of the loss at the step's batch, by parameter name."""
        ...

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Updates the parameters in place."""
        ...


@dataclass
class Outer:
    """A peer's outer state of one fragment: fp32, 1-D."""

    anchor: Tensor
    momentum: Tensor


@dataclass
class Means:
    """The means of a group: of contributions, and of anchors where they are exchanged too."""

    g: Tensor
    anchor: Tensor | None = None


AnchorPrefetch = Callable[[str, int, int, int], int | None]
"""Takes (peer, fragment, round, step after which the round before was applied): the step after
which the peer goes on from the mean anchor of that round's group; None for never."""


def at_once(peer: str, fragment: int, round_: int, applied_at: int) -> int:
    """On links without latency: as soon as the round before has been applied."""
    return applied_at


class ReferenceRun:
    """Trains replicas for `steps` inner steps; the lab changes what an exchange gives.

    Args:
        plan: with exchange `mean` or `pairs`.
        fragments: covering the replicas' parameters.
        replicas: by peer id, all with the same initial parameters.
        run: 64-bit run id, which pairs follow from.
        early_starts: with pairs, when each has the anchors of its next round's group.

    Ref: arXiv:2311.08105 algorithm 1; arXiv:2501.18512 algorithm 2 when tau or alpha is not 0;
    arXiv:2506.10911 with `pairs`."""

    def __init__(
        self,
        plan: Plan,
        fragments: Sequence[Fragment],
        replicas: Mapping[str, TrainedReplica],
        steps: int,
        run: int = 0,
        early_starts: AnchorPrefetch = at_once,
    ) -> None:
        self.plan, self.fragments, self.steps, self.run = plan, fragments, steps, run
        self.replicas, self.peers = replicas, sorted(replicas)
        self.schedule = plan.schedule(fragments=len(fragments), steps=steps)
        start = [fragment.flatten(replicas[self.peers[0]].parameters) for fragment in fragments]
        self.outer = {
            peer: [Outer(anchor, torch.zeros_like(anchor)) for anchor in start]
            for peer in self.peers
        }
        self.rounds = [0] * len(fragments)
        self.norms: dict[tuple[str, int], float] = {}  # of contributions
        self.errors: dict[tuple[str, int], Tensor] = {}  # of those in flight, with merge `keep`
        self.reduction_residuals: dict[int, Tensor] = {}
        self.in_flight: dict[tuple[str, int], Means] = {}
        self.sent: dict[tuple[str, int], Tensor] = {}
        self.early_starts = early_starts
        self.starts: dict[tuple[str, int], Tensor] = {}
        self.begun: dict[tuple[str, int], Tensor] = {}  # what those in flight count from
        self.applied_at = [0] * len(fragments)

    def train(self) -> dict[str, list[Outer]]:
        """Returns by peer the outer state of each fragment; with `mean` it is the same for all."""
        for step in range(1, self.steps + 1):
            gradients = {peer: self.replicas[peer].backward(step) for peer in self.peers}
            if self.plan.payload == "gradient":
                for index, fragment in enumerate(self.fragments):
                    own = {peer: fragment.flatten(gradients[peer]) for peer in self.peers}
                    mean = self.exchange(index, own)
                    for peer in self.peers:  # a copy each: clipping writes into gradients
                        gradients[peer] = {**gradients[peer], **fragment.views(mean.clone())}
            for peer in self.peers:
                self.replicas[peer].inner_step(step, gradients[peer])
            if self.plan.payload == "gradient":
                for peer in self.peers:
                    for fragment, state in zip(self.fragments, self.outer[peer], strict=True):
                        state.anchor = self.local(peer, fragment)
            else:
                self.outer_rounds(step)
        if self.plan.consensus:
            self.agree()
        return self.outer

    def outer_rounds(self, step: int) -> None:
        for due in applies(self.schedule, step):
            self.apply(due.fragment)
        sent = self.schedule.sends(step)
        for due in sent:
            self.send(due.fragment)
        if self.schedule.applies_at_once(step):
            for due in sent:
                self.apply(due.fragment)
        for due in (*applies(self.schedule, step), *sent):
            self.applied_at[due.fragment] = step
        if self.plan.exchange == "pairs":
            self.start_from_groups(step)

    def start_from_groups(self, step: int) -> None:
        """A peer that has the anchors of its next group goes on from their mean."""
        for index, fragment in enumerate(self.fragments):
            round_ = self.rounds[index]
            if (self.peers[0], index) in self.in_flight or round_ >= self.schedule.rounds(index):
                continue
            for group in self.groups(index):
                taking = [
                    peer
                    for peer in group
                    if (peer, index) not in self.starts
                    and self.early_starts(peer, index, round_, self.applied_at[index]) == step
                ]
                if not taking or len(group) == 1:
                    continue
                for peer in taking:
                    mean_anchor = self.mean_anchor(index, group, peer)
                    start = self.plan.group_update().early_start(mean_anchor)
                    if start is None:
                        continue
                    anchor = self.outer[peer][index].anchor
                    take_integers(start, anchor, fragment.exact)
                    self.starts[peer, index] = start
                    moved = carry_over(self.local(peer, fragment), anchor, start)
                    self.write(peer, fragment, moved)

    def send(self, index: int) -> None:
        fragment, own = self.fragments[index], {}
        for peer in self.peers:
            start = self.starts.pop((peer, index), self.outer[peer][index].anchor)
            own[peer] = pseudo_gradient(start, self.local(peer, fragment))
            self.begun[peer, index] = start
        if self.plan.exchange == "pairs":
            self.in_flight.update(self.meet(index, own))
        else:
            mean = self.exchange(index, own)
            self.in_flight.update({(peer, index): Means(mean) for peer in self.peers})
        self.sent.update({(peer, index): g for peer, g in own.items()})

    def apply(self, index: int) -> None:
        fragment = self.fragments[index]
        for peer in self.peers:
            state, means = self.outer[peer][index], self.in_flight.pop((peer, index))
            old, start = state.anchor, self.begun.pop((peer, index))
            state.anchor, state.momentum = self.step(index, state, means)
            local, own = self.local(peer, fragment), self.sent.pop((peer, index))
            base = state.anchor
            if self.plan.keeps:
                error = self.errors.pop((peer, index))
                base = keep_unsent(local, start, state.anchor, own, error)
            merged = merge(local, base, self.plan.merge_alpha)
            self.write(
                peer,
                fragment,
                go_on_with_integers(merged, local, old, own, state.anchor, fragment.exact),
            )

    def step(self, index: int, state: Outer, means: Means) -> tuple[Tensor, Tensor]:
        plan, averaged = self.plan, self.fragments[index].averaged
        if means.anchor is None:
            stepped = plan.nesterov.step(state.anchor, state.momentum, means.g)
            return take_mean(stepped, state.anchor, means.g, averaged)
        update = plan.group_update()
        stepped = update.step(state.anchor, state.momentum, means.g, means.anchor)
        return take_mean(stepped, means.anchor, means.g, averaged)

    def meet(self, index: int, own: Mapping[str, Tensor]) -> dict[tuple[str, int], Means]:
        """Each group's means; a peer that sits out takes its own."""
        update, means = self.plan.group_update(), {}
        for group in self.groups(index):
            arrived = []
            for peer in group:
                values = update.contribution(own[peer], self.outer[peer][index].momentum)
                arrived.append(self.contribution(peer, index, values))
            mean = take_integers(mean_in_order(arrived), arrived[0], self.fragments[index].exact)
            for peer in group:
                means[peer, index] = Means(mean, self.mean_anchor(index, group, peer))
        self.rounds[index] += 1
        return means

    def groups(self, index: int) -> tuple[tuple[str, ...], ...]:
        """The groups of the fragment's next round; a peer that sits it out is one by itself."""
        membership, size = membership_id(self.peers), self.plan.group_size
        drawn = groups(self.run, index, self.rounds[index], membership, self.peers, size)
        alone = set(self.peers).difference(*drawn)
        return (*drawn, *((peer,) for peer in sorted(alone)))

    def mean_anchor(self, index: int, group: Sequence[str], me: str) -> Tensor:
        """The mean of the group's anchors as all decode them, with what the encoding of its own one
        leaves out: x_i + mean(Q(x)) - Q(x_i).

        Ref: arXiv:1902.00340 (CHOCO-Gossip): the mean of all stays what it was."""
        codec = codec_by_name(self.plan.anchor_codec)
        anchors = {peer: self.outer[peer][index].anchor for peer in group}
        decoded = {p: codec.decode(codec.encode(y), y.numel()) for p, y in anchors.items()}
        mean = mean_in_order(decoded.values())
        if codec.name != "fp32":
            mean = mean + (anchors[me] - decoded[me])
        return take_integers(mean, anchors[min(group)], self.fragments[index].exact)

    def agree(self) -> None:
        """The last pass: everyone takes the mean of all anchors, or with merge `keep` of all local
        parameters: where all have one anchor, by their ways to it."""
        for index, fragment in enumerate(self.fragments):
            anchors = [self.outer[peer][index].anchor for peer in self.peers]
            locals_ = [self.local(peer, fragment) for peer in self.peers]
            values = locals_ if self.plan.keeps else anchors
            factors: tuple[float, ...] = (1.0,) * len(values)
            one_anchor = self.plan.exchange == "mean"
            if one_anchor:
                values = [a - local for a, local in zip(anchors, locals_, strict=True)]
                ratios = norm_ratios([norm(way[: len(way) - fragment.exact]) for way in values])
                factors = norm_factors(ratios, NORM_LIMIT)
            mean = take_integers(aggregate(values, factors), values[0], fragment.exact)
            mean = anchors[0] - mean if one_anchor else mean
            for peer in self.peers:
                self.outer[peer][index] = Outer(mean, torch.zeros_like(mean))

    def exchange(self, index: int, own: Mapping[str, Tensor]) -> Tensor:
        """The mean as everyone decodes it: each contribution and the mean through their codecs."""
        plan = self.plan
        self.rounds[index] += 1
        arrived = [self.contribution(peer, index, g) for peer, g in own.items()]
        factors: tuple[float, ...] = (1.0,) * len(arrived)
        if plan.compares_norms:
            ratios = norm_ratios([self.norms[peer, index] for peer in own])
            factors = norm_factors(ratios, NORM_LIMIT)
            self.keep_uncounted(index, own, factors)
        mean, exact = self.aggregate(index, arrived, factors), self.fragments[index].exact
        take_integers(mean, arrived[0], exact)
        if index in self.reduction_residuals:
            mean.add_(self.reduction_residuals[index])
        decoded = self.through(codec_by_name(plan.reduction_codec), mean, exact)
        if plan.keeps_reduction_residual:
            self.reduction_residuals[index] = mean - decoded
        return decoded

    def aggregate(self, index: int, arrived: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        """The mean before it is encoded. Args: arrived: contributions as all decode them."""
        return aggregate(arrived, factors, over=self.plan.mean_over)

    def keep_uncounted(self, index: int, own: Mapping[str, Tensor], factors: list[float]) -> None:
        """Keeps what the norm limit leaves out of a mean, at replicas that keep the rest."""
        values = self.fragments[index].elements - self.fragments[index].exact
        for (peer, g), factor in zip(own.items(), factors, strict=True):
            if self.plan.keeps and factor < 1:
                error = self.errors[peer, index][:values]
                error += (1 - taken_out(factor)) * (g[:values] - error)

    def contribution(self, peer: str, index: int, g: Tensor) -> Tensor:
        """A peer's pseudo-gradient as others decode it."""
        plan, exact = self.plan, self.fragments[index].exact
        decoded = self.through(codec_by_name(plan.codec), g, exact)
        shards = plan.shard_bounds(len(g) - exact, len(self.peers))
        parts = [norm(decoded[start:stop]) for start, stop in shards]
        self.norms[peer, index] = norm_of_parts(parts)
        if plan.keeps:
            self.errors[peer, index] = g - decoded
        return decoded

    def through(self, codec: Codec, values: Tensor, exact: int) -> Tensor:
        """Encoded and decoded, shard by shard; as one where nothing is cut into shards. The last
        `exact` stay as they are."""
        decoded, coded = values.clone(), len(values) - exact
        whole = ((0, coded),)
        shards = self.plan.shard_bounds(coded, len(self.peers))
        for start, stop in whole if self.plan.exchange == "pairs" else shards:
            raw = codec.encode(values[start:stop])
            decoded[start:stop] = codec.decode(raw, stop - start)
        return decoded

    def local(self, peer: str, fragment: Fragment) -> Tensor:
        return fragment.flatten(self.replicas[peer].parameters)

    def write(self, peer: str, fragment: Fragment, values: Tensor) -> None:
        for name, value in fragment.views(values).items():
            self.replicas[peer].parameters[name].copy_(value)
