"""The whole algorithm with all peers in one process: the executable specification.

Real workers must end with the same anchors and outer momenta, bit for bit, when every peer is in
every round and the codecs are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from algorithms.codecs import codec_by_name
from algorithms.fragments import Fragment
from algorithms.mean import mean_in_order
from algorithms.merge import merge
from algorithms.outer import Nesterov
from algorithms.plan import Plan
from algorithms.pseudogradient import pseudo_gradient


class Replica(Protocol):
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
    """What all peers agree on for one fragment: fp32, 1-D."""

    anchor: Tensor
    momentum: Tensor


def train(
    plan: Plan, fragments: Sequence[Fragment], replicas: Mapping[str, Replica], steps: int
) -> list[Outer]:
    """Trains the replicas for `steps` inner steps and returns the outer state of each fragment.

    Args:
        plan: with exchange `mean`.
        fragments: covering the replicas' parameters.
        replicas: by peer id, all with the same initial parameters.

    Ref: arXiv:2311.08105 algorithm 1; arXiv:2501.18512 algorithm 2 when tau or alpha is not 0.
    """
    order = sorted(replicas)
    schedule = plan.schedule(fragments=len(fragments), steps=steps)
    optimizer = Nesterov(plan.outer_lr, plan.outer_momentum)
    to_reducer, from_reducer = codec_by_name(plan.codec), codec_by_name(plan.reduction_codec)
    start = [fragment.flatten(replicas[order[0]].parameters) for fragment in fragments]
    outer = [Outer(anchor, torch.zeros_like(anchor)) for anchor in start]
    in_flight: dict[int, Tensor] = {}

    def exchange(values: Sequence[Tensor]) -> Tensor:
        elements = values[0].numel()
        arrived = [to_reducer.decode(to_reducer.encode(value), elements) for value in values]
        return from_reducer.decode(from_reducer.encode(mean_in_order(arrived)), elements)

    def apply(index: int) -> None:
        state = outer[index]
        state.anchor, state.momentum = optimizer.step(
            state.anchor, state.momentum, in_flight.pop(index)
        )
        for replica in replicas.values():
            local = fragments[index].flatten(replica.parameters)
            merged = merge(local, state.anchor, plan.merge_alpha)
            for name, value in fragments[index].views(merged).items():
                replica.parameters[name].copy_(value)

    for step in range(1, steps + 1):
        gradients = {peer: replicas[peer].backward(step) for peer in order}
        if plan.payload == "gradient":
            for fragment in fragments:
                mean = exchange([fragment.flatten(gradients[peer]) for peer in order])
                for peer in order:  # a copy each: clipping writes into gradients
                    gradients[peer] = {**gradients[peer], **fragment.views(mean.clone())}
        for peer in order:
            replicas[peer].inner_step(step, gradients[peer])
        if plan.payload == "gradient":
            for fragment, state in zip(fragments, outer, strict=True):
                state.anchor = fragment.flatten(replicas[order[0]].parameters)
            continue
        for due in schedule.applies(step):
            apply(due.fragment)
        sent = schedule.sends(step)
        for due in sent:
            anchor, fragment = outer[due.fragment].anchor, fragments[due.fragment]
            in_flight[due.fragment] = exchange(
                [
                    pseudo_gradient(anchor, fragment.flatten(replicas[peer].parameters))
                    for peer in order
                ]
            )
        if schedule.applies_at_once(step):
            for due in sent:
                apply(due.fragment)
    return outer
