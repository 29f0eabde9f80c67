"""The executable specification, held against results that can be written down by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.diloco import mean_in_order
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import Plan
from tests.support.specification import Outer, ReferenceRun, TrainedReplica


@dataclass
class Bowl:
    """Loss |x - target|^2 / 2, with plain SGD inside."""

    target: Mapping[str, Tensor]
    parameters: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = {name: torch.full_like(value, 4.0) for name, value in self.target.items()}

    def backward(self, step: int) -> Mapping[str, Tensor]:
        return {name: value - self.target[name] for name, value in self.parameters.items()}

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        for name, value in self.parameters.items():
            value.sub_(0.25 * gradients[name])


class Slope(Bowl):
    """Loss sum(x): every inner step goes down by 0.25, wherever it is."""

    def backward(self, step: int) -> Mapping[str, Tensor]:
        return {name: torch.ones_like(value) for name, value in self.parameters.items()}


def train(
    plan: Plan, fragments: Sequence[Fragment], replicas: Mapping[str, TrainedReplica], steps: int
) -> list[Outer]:
    """The outer state that all peers end with."""
    first, *others = ReferenceRun(plan, fragments, replicas, steps).train().values()
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine.anchor, theirs.anchor)
            assert torch.equal(mine.momentum, theirs.momentum)
    return first


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


def test_ddp_is_training_all_parameters_on_the_mean_of_the_gradients_bit_for_bit():
    targets = {"a": 1.1, "b": -7.3, "c": 0.2}
    replicas = {peer: bowl(target, "x", "y") for peer, target in targets.items()}
    plan = Plan(inner_steps=1, payload="gradient")
    both = [Fragment(0, (TensorSpec("y", (2,)), TensorSpec("x", (2,))))]
    (state,) = train(plan, both, replicas, steps=9)
    expected = torch.full((4,), 4.0)
    for _ in range(9):
        gradients = [expected - torch.full((4,), targets[peer]) for peer in "abc"]
        expected = expected - 0.25 * mean_in_order(gradients)
    assert torch.equal(state.anchor, expected)
    assert torch.equal(state.momentum, torch.zeros(4))
    assert all(torch.equal(each.parameters["x"], expected[2:]) for each in replicas.values())


@pytest.mark.parametrize(
    ("plan", "steps", "steps_learned"),
    [
        # H=4, tau=1: x is sent after 2, 6, 10 and y after 4, 8, 10. The step taken during the
        # overlap is discarded (alpha 0); the closing round has no overlap.
        (
            Plan(inner_steps=4, fragments=2, overlap_steps=1, outer_lr=0.5, outer_momentum=0.5),
            10,
            {"x": [2, 3, 3], "y": [4, 3, 1]},
        ),
        # Momentum advances only where a fragment was exchanged: each as if it were trained alone.
        (
            Plan(inner_steps=6, fragments=3, outer_lr=0.5, outer_momentum=0.5),
            7,
            {"x": [2, 5], "y": [4, 3], "z": [6, 1]},
        ),
    ],
)
def test_fragments_by_hand(plan, steps, steps_learned):
    names = tuple(steps_learned)
    outer = train(plan, fragments_of(*names), {peer: slope(*names) for peer in "ab"}, steps)
    for state, learned in zip(outer, steps_learned.values(), strict=True):
        anchor, buffer = nesterov([0.25 * n for n in learned], lr=0.5, momentum=0.5, start=4.0)
        assert (state.anchor[0].item(), state.momentum[0].item()) == (anchor, buffer)


def test_alpha_keeps_its_share_of_the_steps_during_the_overlap_by_hand():
    """Local: 4, 3.75, 3.5 (sent), 3.25 -> merged 0.5*3.25 + 0.5*3.5 = 3.375, then 3.125 (sent)."""
    plan = Plan(inner_steps=2, overlap_steps=1, merge_alpha=0.5, outer_lr=1.0, outer_momentum=0.0)
    replica = slope("x")
    anchor, g = only(train(plan, fragments_of("x"), {"a": replica}, steps=4))
    assert g == 3.5 - 3.125
    assert anchor == 3.125
    assert replica.parameters["x"].tolist() == [3.125, 3.125]


def test_contributions_go_through_their_codec_and_the_mean_through_its_own():
    """Targets whose pseudo-gradients bf16 cannot hold."""
    targets = {"a": 4 - 1.0009765625, "b": 4 - 2.0}  # g = 0.25 * (1 + 2^-10) and 0.25 * 2

    def g_of(codec: str, reduction_codec: str) -> float:
        plan = Plan(inner_steps=1, codec=codec, reduction_codec=reduction_codec, outer_momentum=0.0)
        replicas = {peer: bowl(target) for peer, target in targets.items()}
        return only(train(plan, fragments_of("x"), replicas, steps=1))[1]

    assert g_of("fp32", "fp32") == 0.25 * (3 + 2**-10) / 2
    assert g_of("bf16", "fp32") == g_of("fp32", "bf16") == g_of("bf16", "bf16") == 0.25 * 1.5


@pytest.mark.parametrize(
    ("consensus", "anchor"), [(False, [3.25, 4.25]), (True, [3.0, 4.0])], ids=["", "consensus"]
)
def test_keeping_by_hand(consensus, anchor):
    """One peer, H = 1, a slope of 0.5 a step in one value and none in the other.

    Step 1: D is (0.5, 0), sent as (0.25, 0.25); the anchor goes from 4 to 3.75, the replica to
    3.75 - (0.25, -0.25) = (3.5, 4). Step 2: the replica is at (3, 4) and D is (0.75, -0.25), sent
    as (0.5, -0.5); the anchor goes to (3.25, 4.25), the replica back to (3, 4). The last mean, if
    there is one, is of replicas."""
    plan = Plan(inner_steps=1, outer_lr=1.0, outer_momentum=0.0, merge="keep", codec="sign")
    replica = slope("x")
    replica.backward = lambda step: {"x": torch.tensor([2.0, 0.0])}  # type: ignore[method-assign]
    run = replace(plan, consensus=consensus), fragments_of("x"), {"a": replica}, 2
    assert train(*run)[0].anchor.tolist() == anchor
    assert replica.parameters["x"].tolist() == [3.0, 4.0]
