"""Inner steps on one peer, and how far each takes it in the schedule."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from murmuration.algorithms.plan import Plan
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica, Pace


class Line:
    """Fit y = 2x with a linear model; a sample is its own position."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.fill_(0.1 * (index + 1))
        return model

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        while True:
            x = torch.arange(cursor.position, cursor.position + 2).float().unsqueeze(1)
            cursor = cursor.advance(2)
            yield Batch(x, 2 * x, cursor)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch.inputs), batch.targets)


def replica(config: InnerConfig, model: nn.Module | None = None) -> InnerReplica:
    return InnerReplica(Line(), model or Line().model(), config, Cursor(seed=0, stream="a"), 20)


def trained(each: InnerReplica, steps: int) -> InnerReplica:
    for step in range(1, steps + 1):
        each.inner_step(step, each.backward(step))
    return each


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
def test_it_trains_as_adamw_with_clipping_does(clip):
    config = InnerConfig(lr=0.01, warmup_steps=3, clip=clip, weight_decay=0.1)
    ours = trained(replica(config), 10)
    task, model = Line(), Line().model()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    batches = task.batches("train", Cursor(seed=0, stream="a"))
    for step in range(1, 11):
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = config.lr_at(step, 20)
        optimizer.step()
    assert ours.last_gradient_norm is not None
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours.parameters[name], parameter, rtol=1e-4, atol=1e-6)


def test_moments_of_any_type_are_looked_at():
    each = trained(replica(InnerConfig(lr=0.1)), 1)
    first, *_ = each.optimizers[0].state.values()
    moments = first["exp_avg"]
    for dtype in (torch.float64, torch.float8_e4m3fn, torch.bfloat16):
        for value, finite in ((1.0, True), (math.nan, False)):
            first["exp_avg"] = torch.full_like(moments, value).to(dtype)
            assert each.moments_are_finite == finite, dtype
    first["exp_avg"] = moments.as_subclass(Quantised)
    assert each.moments_are_finite


class Quantised(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: object, *_: object) -> object:
        raise NotImplementedError(func)


def test_forgetting_the_moments_is_a_fresh_optimizer_on_the_same_parameters():
    config = InnerConfig(lr=0.1, warmup_steps=0)
    used = trained(replica(config), 5)
    used.reset_moments()
    fresh = replica(config)
    for name, value in fresh.parameters.items():
        value.copy_(used.parameters[name])
    gradients = {name: torch.ones_like(value) for name, value in fresh.parameters.items()}
    for each in (used, fresh):
        each.inner_step(6, {name: g.clone() for name, g in gradients.items()})
    assert all(map(torch.equal, fresh.parameters.values(), used.parameters.values()))


def test_a_mean_of_gradients_in_fp32_serves_parameters_in_bf16():
    each = replica(InnerConfig(), model=(model := Line().model().to(torch.bfloat16)))
    seen: list[torch.dtype] = []
    each.optimizers[0].register_step_pre_hook(
        lambda *_: seen.extend(p.grad.dtype for p in model.parameters() if p.grad is not None)
    )
    each.inner_step(1, {name: torch.ones(p.shape) for name, p in each.parameters.items()})
    assert seen == [torch.bfloat16] * len(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())  # their memory is given back


def measured(inner_steps: int, own_s: float, fastest_s: float, *, unequal: bool = True) -> Pace:
    pace = Pace(Plan(inner_steps=inner_steps, dylu=unequal))
    for _ in range(30):
        pace.stepped(own_s)
    pace.fastest_s = fastest_s
    return pace


def test_a_peer_that_rounds_close_without_sends_earlier():
    pace = measured(20, 0.1, 0.1)
    for counted, stride in ((False, 6), (False, 11), (False, 11), (True, 1), (False, 6)):
        pace.round_closed(0.0, counted=counted)
        assert [pace.stride(), pace.stride()] == [stride, 1]
    pace = measured(20, 0.1, 0.1, unequal=False)
    pace.round_closed(0.0, counted=False)
    assert pace.stride() == 1


def test_autocast_computes_in_bf16_and_trains_in_fp32():
    seen: list[torch.dtype] = []
    each = replica(InnerConfig(precision="bf16"), model := Line().model())
    model.register_forward_hook(lambda _model, _inputs, out: seen.append(out.dtype) or out.float())
    trained(each, 2)
    assert seen == [torch.bfloat16] * 2
    assert {p.dtype for p in each.parameters.values()} == {torch.float32}
