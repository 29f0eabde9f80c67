"""What of a model travels, and what becomes of running statistics in a round."""

import pytest
import torch
from torch import nn

from algorithms.fragment_state import RoundResult
from algorithms.fragments import Fragment, partition
from algorithms.presets import PRESETS
from murmuration import Swarm
from worker.training.fragment import FragmentReplica
from worker.training.model import bare_name, running_statistics, schema_of


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_saved_floating_buffers_travel_and_others_do_not() -> None:
    model = normalised()
    model.register_buffer("table", torch.ones(4), persistent=False)
    assert [(s.name, s.averaged) for s in schema_of(model)] == [
        ("0.weight", False),
        ("0.bias", False),
        ("1.weight", False),
        ("1.bias", False),
        ("1.running_mean", True),
        ("1.running_var", True),
    ]
    assert not any(spec.averaged for spec in schema_of(model, statistics=False))


def test_names_are_those_of_the_bare_model() -> None:
    compiled = torch.compile(normalised(), backend="eager")
    assert [spec.name for spec in schema_of(compiled)] == [s.name for s in schema_of(normalised())]
    assert bare_name("module._orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"


def replica_of(model: nn.Module, preset: str) -> tuple[FragmentReplica, Fragment]:
    (fragment,) = partition(schema_of(model), 1)
    named = dict(model.named_parameters()) | running_statistics(model)
    values = {name: value.detach() for name, value in named.items()}
    return FragmentReplica(fragment, PRESETS[preset], values), fragment


@pytest.mark.parametrize("preset", ["diloco", "noloco"])
def test_the_new_anchor_has_the_mean_of_the_statistics_and_no_momentum_of_them(preset: str) -> None:
    model = normalised()
    each, fragment = replica_of(model, preset)
    assert fragment.averaged == ((15, 21),)
    before = each.state.anchor
    g = torch.arange(21.0)
    each.contribute(g, step=1)
    middle = before + 1 if preset == "noloco" else None
    result = RoundResult(0, g.clone(), 2, ("a", "b"), (), mean_anchor=middle)
    each.write(each.apply(result, each.local))
    start = before if middle is None else middle
    assert torch.equal(each.state.anchor[15:], start[15:] - g[15:])
    assert not each.state.momentum[15:].any()
    assert each.state.momentum[1:15].any()


def test_a_variance_is_never_below_zero() -> None:
    model = normalised()
    each, _ = replica_of(model, "diloco")
    each.write(each.state.anchor - 5)
    assert torch.equal(model[1].running_var, torch.zeros(3))
    assert torch.equal(model[1].running_mean, torch.full((3,), -5.0))


@pytest.mark.parametrize("preset", ["diloco", "ddp"])
def test_a_swarm_of_one_keeps_the_statistics_that_it_has(preset: str) -> None:
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Swarm(model, optimizer, preset=preset, steps=4) as swarm:
        while not swarm.done:
            model(torch.randn(8, 2) + 3).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            local = model[1].running_mean.clone()
    torch.testing.assert_close(model[1].running_mean, local)
    assert local.abs().sum() > 0
