"""Inner optimizers by name, their schedules, and what a checkpoint keeps of them."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from murmuration.worker.tasks import Cursor, TaskError
from murmuration.worker.training.optimizers import InnerConfig, Muon
from murmuration.worker.training.replica import InnerReplica
from tests.unit.worker.training.test_replica import Line, trained


def replica(config: InnerConfig, task: Any = None) -> InnerReplica:
    task = task or Line()
    return InnerReplica(task, task.model(), config, Cursor(seed=0, stream="a"), 20)


def values(each: InnerReplica) -> torch.Tensor:
    return torch.cat([p.flatten() for p in each.parameters.values()])


adagrad = partial(torch.optim.Adagrad, lr=0.2)


def half(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:1], lr=0.2)


class Learns(torch.optim.Optimizer):
    """Keeps numbers in its groups, as Prodigy does."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99), "k": 0, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["k"] += 1
        group["d"] *= 1.5
        assert isinstance(group["betas"], tuple)
        for p in group["params"]:
            p -= group["lr"] / group["k"] * group["d"] * p.grad


HERE = "tests.unit.worker.training.test_optimizers"


def test_each_learns_and_goes_on_from_what_was_saved():
    kinds_of = {"auto": "AdamW", "adamw": "AdamW", "muon": "Muon AdamW", "sgd": "SGD"}
    own = {f"{HERE}:adagrad": "Adagrad", f"{HERE}:Learns": "Learns"}
    for name, kinds in {**kinds_of, **own}.items():
        config = InnerConfig(optimizer=name, lr=0.02, warmup_steps=2)
        whole = trained(replica(config), 6)
        assert " ".join(type(each).__name__ for each in whole.optimizers) == kinds
        first = trained(replica(config), 3)
        tensors, plain = first.optimizer_state()
        second = replica(config)
        for parameter, value in first.parameters.items():
            second.parameters[parameter].copy_(value)
        second.restore_optimizers({**tensors, **json.loads(json.dumps(plain))}, 3)
        second.batches = Line().batches("train", first.cursor)
        for step in range(4, 7):
            second.inner_step(step, second.backward(step))
        assert torch.equal(values(second), values(whole)), name
        assert not torch.equal(values(whole), values(replica(config))), name


@pytest.mark.parametrize(("kind", "place"), [("fused", "meta"), ("foreach", "cpu")])
def test_the_count_of_steps_comes_back_where_the_optimizer_reads_it(kind, place):
    config, task = InnerConfig(optimizer=f"{HERE}:adagrad"), Line()
    tensors, plain = trained(replica(config), 1).optimizer_state()
    task.model = lambda: Line().model().to("meta")  # stands for one on an accelerator
    there = replica(config, task)
    there.optimizers[0].param_groups[0][kind] = True
    there.restore_optimizers({**tensors, **plain}, 1)
    kept, _ = there.optimizer_state()
    assert {value.device.type for value in kept.values() if value.dim() == 0} == {place}
    assert all(value.is_meta for value in kept.values() if value.dim())


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest():
    config, task = InnerConfig(optimizer="muon"), Line()
    layers = nn.ModuleList([nn.Linear(4, 4)])
    task.model = lambda: nn.ModuleDict({"embed": nn.Embedding(9, 4), "layers": layers})
    muon, adamw = replica(config, task).optimizers
    shapes = [[tuple(p.shape) for g in o.param_groups for p in g["params"]] for o in (muon, adamw)]
    assert shapes == [[(4, 4)], [(9, 4), (4,)]]
    task.model = lambda: nn.Linear(1, 1)
    with pytest.raises(TaskError, match="no matrices in numbered layers"):
        replica(config, task)


def test_a_factory_that_cannot_be_used_is_one_line():
    for name, says in [
        (f"{HERE}:half", "not over the parameters it was given"),
        ("builtins:list", "returned list"),
        (f"{HERE}:nobody", "has no 'nobody'"),
        ("nowhere:factory", "optimizer 'nowhere:factory': no module named 'nowhere'"),
    ]:
        with pytest.raises(TaskError, match=says):
            replica(InnerConfig(optimizer=name))


def test_a_step_of_muon_is_torchs_own_but_for_its_bf16():
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 10), [torch.randn(6, 10) for _ in range(3)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    pair = [Muon([ours], **settings), reference]
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for each in pair:
            each.step()
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


class OwnOptimizer(Line):
    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_a_tasks_own_optimizer_and_schedule_are_taken():
    own, rates = replica(InnerConfig(), OwnOptimizer()), []
    own.optimizers[0].register_step_pre_hook(lambda *_: rates.append(own.learning_rate))
    for step in (1, 2, 3, 7, 6):  # another peer's word moves it
        own.inner_step(step, own.backward(step))
    assert rates == [0.5, 0.25, 0.125, 0.5**7, 0.5**8]
    named = replica(InnerConfig(optimizer="adamw"), OwnOptimizer())
    assert isinstance(named.optimizers[0], torch.optim.AdamW)
    resumed = replica(InnerConfig(), OwnOptimizer())
    resumed.restore_optimizers({}, 3)
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.0625


def test_schedules():
    for schedule, warmup_steps, least, steps, rates in [
        ("constant", 2, 0.0, range(1, 7), [0.5, 1, 1, 1, 1, 1]),
        ("linear", 2, 0.0, range(1, 7), [0.5, 1, 0.75, 0.5, 0.25, 0]),
        ("wsd", 0, 0.1, (1, 50, 80, 90, 100), [1, 1, 1, 0.55, 0.1]),
    ]:
        given = {"schedule": schedule, "warmup_steps": warmup_steps, "min_lr_ratio": least}
        config = InnerConfig(lr=1.0, **given)
        found = [config.lr_at(step, steps[-1]) for step in steps]
        assert found == pytest.approx(rates, abs=1e-4), schedule


def test_accumulated_gradients_are_the_mean_over_the_batches():
    one, two = replica(InnerConfig()), replica(InnerConfig(accumulate=2))
    first, second = (
        {name: gradient.clone() for name, gradient in one.backward(1).items()} for _ in range(2)
    )
    together = two.backward(1)
    assert two.cursor.position == one.cursor.position == 4
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, (first[name] + second[name]) / 2)


def test_settings_that_cannot_be_are_refused():
    for changes, says in [
        ({"optimizer": "adam"}, "optimizer is 'adam'; use auto, adamw"),
        ({"schedule": "cosin"}, "schedule is 'cosin'; use cosine"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"momentum": 1.0}, "beta1, beta2 and momentum must be"),
        ({"beta1": 1.0}, "beta1, beta2 and momentum must be"),
        ({"beta2": -0.1}, "beta1, beta2 and momentum must be"),
        ({"lr": 0.0}, r"^lr is 0\.0; it must be above 0$"),
        ({"warmup_steps": -1}, "must be at least 0"),
        ({"weight_decay": -0.1}, "must be at least 0"),
        ({"clip": -1.0}, "must be at least 0"),
        ({"min_lr_ratio": 1.5}, r"^min_lr_ratio is 1\.5; it must be 0 to 1$"),
    ]:
        with pytest.raises(ValueError, match=says):
            InnerConfig(**changes)
