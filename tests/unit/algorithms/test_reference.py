"""The executable specification, held against results that can be written down by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from algorithms.fragments import Fragment, TensorSpec
from algorithms.mean import mean_in_order
from algorithms.plan import Plan
from algorithms.reference import Outer, train


@dataclass
class Bowl:
    """Loss curvature/2 * |x - target|^2 with plain SGD inside; curvature 0 is a slope instead."""

    target: Mapping[str, Tensor]
    curvature: float = 1.0
    lr: float = 0.25
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = {name: torch.full_like(value, 4.0) for name, value in self.target.items()}

    def backward(self, step: int) -> Mapping[str, Tensor]:
        return {
            name: self.curvature * (value - self.target[name])
            for name, value in self.parameters.items()
        }

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        for name, value in self.parameters.items():
            value.sub_(self.lr * gradients[name])


class Slope(Bowl):
    """Loss sum(x): every inner step goes down by `lr`, wherever it is."""

    def backward(self, step: int) -> Mapping[str, Tensor]:
        return {name: torch.ones_like(value) for name, value in self.parameters.items()}


def fragments_of(*names: str) -> list[Fragment]:
    return [Fragment(i, (TensorSpec(name, (2,)),)) for i, name in enumerate(names)]


def bowl(target: float, *names: str) -> Bowl:
    return Bowl({name: torch.full((2,), target) for name in names or ("x",)})


def slope(*names: str) -> Slope:
    return Slope({name: torch.zeros(2) for name in names})


def nesterov(gs: list[float], lr: float, momentum: float, start: float) -> tuple[float, float]:
    """(anchor, buffer) after these pseudo-gradients, in plain floats."""
    anchor, buffer = start, 0.0
    for g in gs:
        buffer = momentum * buffer + g
        anchor -= lr * (g + momentum * buffer)
    return anchor, buffer


def only(outer: list[Outer]) -> tuple[float, float]:
    (state,) = outer
    assert torch.equal(state.anchor, state.anchor[:1].expand(2))
    return state.anchor[0].item(), state.momentum[0].item()


def test_one_replica_contracts_as_its_closed_form_says() -> None:
    plan = Plan(inner_steps=5, outer_lr=0.7, outer_momentum=0.0)
    anchor, _ = only(train(plan, fragments_of("x"), {"a": bowl(1.0)}, steps=20))
    shrink = 1 - 0.7 * (1 - 0.75**5)  # of the distance to the target, a round
    assert anchor == pytest.approx(1 + 3 * shrink**4, rel=1e-6)


def test_several_replicas_contract_to_the_mean_of_their_targets() -> None:
    plan = Plan(inner_steps=5, outer_lr=0.7, outer_momentum=0.9)
    replicas = {"c": bowl(-3.0), "a": bowl(1.0), "b": bowl(5.0)}
    anchor, buffer = only(train(plan, fragments_of("x"), replicas, steps=40))
    expected, momentum = 4.0, 0.0
    for _ in range(8):
        g = (1 - 0.75**5) * (expected - 1.0)
        momentum = 0.9 * momentum + g
        expected -= 0.7 * (g + 0.9 * momentum)
    assert anchor == pytest.approx(expected, rel=1e-5)
    assert buffer == pytest.approx(momentum, rel=1e-5)


def test_equal_replicas_are_one_replica_bit_for_bit() -> None:
    plan = Plan(inner_steps=3)
    (alone,) = train(plan, fragments_of("x"), {"a": bowl(1.3)}, steps=10)
    four = {peer: bowl(1.3) for peer in "abcd"}
    (together,) = train(plan, fragments_of("x"), four, steps=10)
    assert torch.equal(alone.anchor, together.anchor)
    assert torch.equal(alone.momentum, together.momentum)


def test_the_order_in_which_replicas_are_named_does_not_matter() -> None:
    targets = {"a": 1e8, "b": -1e8, "c": 1.3}
    plan = Plan(inner_steps=3)
    runs = [
        train(plan, fragments_of("x"), {peer: bowl(targets[peer]) for peer in order}, steps=7)
        for order in ("abc", "cab", "bca")
    ]
    assert all(torch.equal(run[0].anchor, runs[0][0].anchor) for run in runs)


def test_a_plain_outer_step_of_one_replica_is_plain_training() -> None:
    plan = Plan(inner_steps=4, outer_lr=1.0, outer_momentum=0.0)
    anchor, _ = only(train(plan, fragments_of("x"), {"a": slope("x")}, steps=11))
    assert anchor == 4.0 - 11 * 0.25


def test_ddp_is_training_on_the_mean_of_the_gradients_bit_for_bit() -> None:
    targets = {"a": 1.1, "b": -7.3, "c": 0.2}
    replicas = {peer: bowl(target) for peer, target in targets.items()}
    plan = Plan(inner_steps=1, payload="gradient")
    (state,) = train(plan, fragments_of("x"), replicas, steps=9)
    expected = torch.full((2,), 4.0)
    for _ in range(9):
        gradients = [expected - torch.full((2,), targets[peer]) for peer in "abc"]
        expected = expected - 0.25 * mean_in_order(gradients)
    assert torch.equal(state.anchor, expected)
    assert torch.equal(state.momentum, torch.zeros(2))
    assert all(torch.equal(each.parameters["x"], expected) for each in replicas.values())


class Doubling(Bowl):
    """Writes into the gradients that it is given, as clipping does."""

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        for gradient in gradients.values():
            gradient.mul_(2.0)
        super().inner_step(step, gradients)


def test_in_ddp_no_replica_sees_what_another_does_to_its_gradients() -> None:
    replicas = {peer: Doubling({"x": torch.full((2,), 1.0)}) for peer in "abc"}
    train(Plan(inner_steps=1, payload="gradient"), fragments_of("x"), replicas, steps=4)
    for each in replicas.values():
        assert each.parameters["x"].tolist() == pytest.approx([1 + 3 * 0.5**4] * 2)


def test_ddp_covers_every_parameter() -> None:
    replicas = {"a": bowl(0.0, "x", "y"), "b": bowl(2.0, "x", "y")}
    both = [Fragment(0, (TensorSpec("y", (2,)), TensorSpec("x", (2,))))]
    (state,) = train(Plan(inner_steps=1, payload="gradient"), both, replicas, steps=30)
    assert state.anchor.tolist() == pytest.approx([1 + 3 * 0.75**30] * 4, rel=1e-5)


def test_two_fragments_with_overlap_by_hand() -> None:
    """H=4, tau=1, 10 steps: x is sent after 2, 6, 10 and y after 4, 8, 10.

    The step taken during the overlap is discarded (alpha 0); the closing round has no overlap.
    """
    plan = Plan(inner_steps=4, fragments=2, overlap_steps=1, outer_lr=0.5, outer_momentum=0.5)
    replicas = {"a": slope("x", "y"), "b": slope("x", "y")}
    outer = train(plan, fragments_of("x", "y"), replicas, steps=10)
    steps_learned = {"x": [2, 3, 3], "y": [4, 3, 1]}
    for state, steps in zip(outer, steps_learned.values(), strict=True):
        anchor, buffer = nesterov([0.25 * n for n in steps], lr=0.5, momentum=0.5, start=4.0)
        assert (state.anchor[0].item(), state.momentum[0].item()) == (anchor, buffer)


def test_momentum_advances_only_where_a_fragment_was_exchanged() -> None:
    """x has four rounds, y one and the closing one: each as if it were trained alone."""
    plan = Plan(inner_steps=6, fragments=3, outer_lr=0.5, outer_momentum=0.5)
    names = ("x", "y", "z")
    outer = train(plan, fragments_of(*names), {"a": slope(*names)}, steps=7)
    steps_learned = {"x": [2, 5], "y": [4, 3], "z": [6, 1]}
    for state, steps in zip(outer, steps_learned.values(), strict=True):
        anchor, buffer = nesterov([0.25 * n for n in steps], lr=0.5, momentum=0.5, start=4.0)
        assert (state.anchor[0].item(), state.momentum[0].item()) == (anchor, buffer)


def test_alpha_keeps_its_share_of_the_steps_during_the_overlap_by_hand() -> None:
    """Local: 4, 3.75, 3.5 (sent), 3.25 -> merged 0.5*3.25 + 0.5*3.5 = 3.375, then 3.125 (sent)."""
    plan = Plan(inner_steps=2, overlap_steps=1, merge_alpha=0.5, outer_lr=1.0, outer_momentum=0.0)
    replica = slope("x")
    anchor, g = only(train(plan, fragments_of("x"), {"a": replica}, steps=4))
    assert g == 3.5 - 3.125
    assert anchor == 3.125
    assert replica.parameters["x"].tolist() == [3.125, 3.125]


def test_after_the_last_step_everything_learned_is_in_the_anchor() -> None:
    for steps in range(1, 13):
        plan = Plan(inner_steps=5, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0)
        anchor, _ = only(train(plan, fragments_of("x"), {"a": slope("x")}, steps=steps))
        assert anchor == 4.0 - 0.25 * steps


def test_contributions_go_through_their_codec_and_the_mean_through_its_own() -> None:
    """Targets whose pseudo-gradients bf16 cannot hold."""
    targets = {"a": 4 - 1.0009765625, "b": 4 - 2.0}  # g = 0.25 * (1 + 2^-10) and 0.25 * 2

    def g_of(codec: str, reduction_codec: str) -> float:
        plan = Plan(inner_steps=1, codec=codec, reduction_codec=reduction_codec, outer_momentum=0.0)
        replicas = {peer: bowl(target) for peer, target in targets.items()}
        return only(train(plan, fragments_of("x"), replicas, steps=1))[1]

    assert g_of("fp32", "fp32") == 0.25 * (3 + 2**-10) / 2
    assert g_of("bf16", "fp32") == 0.25 * 1.5
    assert g_of("fp32", "bf16") == 0.25 * 1.5
    assert g_of("bf16", "bf16") == 0.25 * 1.5


def test_replicas_end_on_the_anchor_when_nothing_is_in_flight() -> None:
    replicas = {"a": bowl(1.0), "b": bowl(-2.0)}
    (state,) = train(Plan(inner_steps=4), fragments_of("x"), replicas, steps=8)
    assert all(torch.equal(each.parameters["x"], state.anchor) for each in replicas.values())
