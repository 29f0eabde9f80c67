"""A program that cannot be trained is refused in one line; what wraps a model or an optimizer is
looked through."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from murmuration.worker.config import load_config
from murmuration.worker.errors import UsageError
from murmuration.worker.library.hooks import UserReplica
from murmuration.worker.manifest import Manifest
from tests.support.peers import row
from tests.support.refusals import one_line


def linear() -> nn.Linear:
    return nn.Linear(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_gradients_are_put_back_where_there_were_none():
    model = linear()
    replica = UserReplica(model, sgd(model))
    gradients = {name: torch.ones_like(g) for name, g in replica.gradients.items()}
    replica.set_gradients(gradients)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def from_one_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).clone()
    nn.utils.vector_to_parameters(vector, model.parameters())


def buffers_anew(model: nn.Module) -> None:
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.running_mean = norm.running_mean + 0.0
    norm.num_batches_tracked = norm.num_batches_tracked + 0


def elsewhere(values: Iterator[torch.Tensor]) -> None:
    for each in values:
        each.data = each.data.clone()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: elsewhere(model.parameters()),
        from_one_vector,
        buffers_anew,
        lambda model: elsewhere(model.buffers()),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to(torch.bfloat16).to(torch.float32),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model[0].weight.data.set_(torch.zeros(2, 3, 3, 3)),
    ],
    ids=["data", "vector", "buffers", "buffers' data", "layout", "type", "state dict", "set_"],
)
def test_reads_and_writes_follow_the_tensors_of_the_model(change):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    replica = UserReplica(model, sgd(model))
    parameters = replica.parameters
    change(model)
    replica.refresh()
    for value in parameters.values():
        value.fill_(7)
    state = model.state_dict()
    assert all(torch.all(state[name] == 7) for name in ("0.weight", "0.bias", "1.running_mean"))
    assert model[1].num_batches_tracked == int.from_bytes(b"\0\7" * 4)


@row("a part that is new, thawed, gone or of fp64 within the block", "refused", "build it before")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.add_module("more", linear()), r"'more\.weight' was added"),
        (lambda model: delattr(model[0], "bias"), "one was taken away.: remove, or merge"),
        (lambda model: model[0].weight.requires_grad_(False), None),
        (lambda model: setattr(model[0].weight, "data", torch.ones(1, 2)), r"'0\.weight' has"),
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 3))), "was added"),
        (lambda model: model.register_buffer("more", torch.ones(1)), "'more' is new or gone"),
        (lambda model: model[0].double(), r"'0\.weight' is of type torch\.float64"),
        (lambda model: delattr(model[1], "running_var"), r"'1\.running_var' is new or gone"),
        (lambda model: setattr(model[1], "running_var", torch.ones(3)), r"'1\.running_var' has"),
        (lambda model: model[1].running_mean.resize_(5), r"'1\.running_mean' has"),
        (lambda model: model[1].half(), None),
        (lambda model: model.register_buffer("more", torch.ones(1), persistent=False), None),
    ],
)
def test_other_tensors_than_the_swarms_are_refused(change, says):
    model = nn.Sequential(linear(), nn.BatchNorm1d(2))
    replica = UserReplica(model, sgd(model))
    change(model)
    if says is None:
        replica.refresh()
        return
    with one_line(UsageError, says):
        replica.refresh()


@row("buffers of another type on each peer", "refused", "by all but one")
def test_buffers_of_another_type_are_another_model():
    def manifest_with(buffer: torch.Tensor) -> Manifest:
        model = linear()
        model.register_buffer("x", buffer)
        return Manifest.of(load_config(None, []), UserReplica(model, sgd(model)).schema)

    first, other = (manifest_with(x) for x in (torch.ones(3).int(), torch.ones(3, 2)))
    assert first.agreed == other.agreed
    assert "of other types" in str(first.other_order(other))
    assert first.other_order(first) is None
