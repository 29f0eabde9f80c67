"""What cannot be trained is refused in one line; what wraps a model or an optimizer is looked
through."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from worker.errors import UsageError
from worker.library.hooks import UserReplica


def linear() -> nn.Linear:
    return nn.Linear(3, 2)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (nn.Identity, "no parameters"),
        (frozen, "every parameter is frozen"),
        (lambda: linear().to("meta"), "device meta"),
    ],
)
def test_a_model_without_anything_to_train_is_refused(
    make: Callable[[], nn.Module], says: str
) -> None:
    model = make()
    optimizer = sgd(model if says == "device meta" else linear())
    with pytest.raises(UsageError, match=says) as refused:
        UserReplica(model, optimizer)
    assert "\n" not in str(refused.value)


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="2 parameters that are not model Linear's") as refused:
        UserReplica(linear(), sgd(linear()))
    assert "\n" not in str(refused.value)


def test_parameters_added_or_frozen_later_are_noticed() -> None:
    model = nn.Sequential(linear())
    replica = UserReplica(model, sgd(model))
    replica.check_unchanged()
    model.append(linear())
    with pytest.raises(UsageError, match=r"'1\.weight' was added"):
        replica.check_unchanged()
    model.pop(1)
    model[0].weight.requires_grad_(False)
    with pytest.raises(UsageError, match="frozen or taken away"):
        replica.check_unchanged()


def test_tied_weights_are_one_parameter() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert [spec.name for spec in UserReplica(model, sgd(model)).schema] == ["0.weight"]


def test_one_model_is_in_one_swarm_at_a_time() -> None:
    model = linear()
    replica = UserReplica(model, sgd(model))
    with replica.hooked(int, int), pytest.raises(UsageError, match="in a swarm already"):
        UserReplica(model, sgd(model)).hooked(int, int).__enter__()
    with replica.hooked(int, int):
        pass


def test_hooks_are_around_the_innermost_step_and_gone_afterwards() -> None:
    model, calls = linear(), []
    inner = sgd(model)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    replica = UserReplica(model, Wrapper(inner))
    with replica.hooked(lambda: calls.append("before"), lambda: calls.append("after")):
        inner.step()
    inner.step()
    assert calls == ["before", "after"]


def test_sparse_gradients_cannot_be_averaged() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    replica = UserReplica(model, sgd(model))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse gradient"):
        _ = replica.gradients


def test_gradients_are_put_back_where_there_were_none() -> None:
    model = linear()
    replica = UserReplica(model, sgd(model))
    gradients = {name: torch.ones_like(g) for name, g in replica.gradients.items()}
    replica.set_gradients(gradients)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_several_optimizers_are_one_step() -> None:
    model, calls = nn.Sequential(linear(), linear()), []
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    replica = UserReplica(model, pair)
    with replica.hooked(lambda: calls.append("before"), lambda: calls.append("after")):
        for each in pair:
            each.step()
            calls.append("stepped")
    assert calls == ["before", "stepped", "after", "stepped"]
    with pytest.raises(UsageError, match="no optimizer was given"):
        UserReplica(model, [])
