"""What a peer does by itself: inner steps, and how far each takes it in the schedule."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from worker.tasks import Cursor, Task, next_batch
from worker.training.config import InnerConfig
from worker.training.inbox import IterationOver, StageJob

_REMEMBERED_STEPS = 16
_FIRST_STEPS = 4  # slower than the rest: the machine warms up
_ALIKE = 0.9  # of the fastest peer's speed, and above, is as fast: speeds are measured with noise
_NEWS = 0.1  # a change of the own step time that is published


class Replica(Protocol):
    """What the outer loop asks of a model that is trained. train thread only."""

    loss: float  # of the last step; NaN where there is none

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Local parameters by name, detached: writing into them changes the model."""
        ...

    def handle(self, message: StageJob | IterationOver) -> None:
        """A job for a stage."""
        ...

    def reset_moments(self) -> None:
        """Forgets what the optimizer knows, after it has led astray."""
        ...


class InnerReplica:
    """One peer's model, inner optimizer and place in its stream of samples. train thread only.

    Implements `algorithms.reference.Replica`.
    """

    def __init__(
        self, task: Task, model: nn.Module, config: InnerConfig, cursor: Cursor, steps: int
    ) -> None:
        self.model, self.cursor = model, cursor
        self._task, self._config, self._steps = task, config, steps
        self._batches = task.batches("train", cursor)
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._parameters: dict[str, Tensor] = {n: p.detach() for n, p in self._named.items()}
        decayed = [name for name, p in self._named.items() if p.dim() >= 2]
        exempt = [name for name, p in self._named.items() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": [self._named[name] for name in decayed]},
            {"params": [self._named[name] for name in exempt], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.optimizer_names = (*decayed, *exempt)
        self.loss = math.nan

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Local parameters by name, detached: writing into them changes the model."""
        return self._parameters

    def handle(self, message: StageJob | IterationOver) -> None:
        """A whole model has no jobs to do for others."""

    def reset_moments(self) -> None:
        """Forgets what the optimizer knows, after it has led astray."""
        self.optimizer.state.clear()

    def backward(self, step: int) -> Mapping[str, Tensor]:
        """Gradients at the next batch, zeros where it has none; sets `loss` and moves `cursor`."""
        batch = next_batch(self._batches, "train")
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.loss, self.cursor = loss.item(), batch.cursor
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._named.items()
        }

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Clips, then one AdamW step at the schedule's learning rate."""
        for name, parameter in self._named.items():
            parameter.grad = gradients[name]
        if self._config.clip > 0:
            nn.utils.clip_grad_norm_(self._named.values(), self._config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.lr_at(step, self._steps)
        self.optimizer.step()


class Pace:
    """How far in the schedule one inner step takes this peer (DyLU).

    A peer at half the speed of the fastest makes half as many inner steps in a period, each of
    which counts for two in the schedule; so rounds are due everywhere at about the same time.

    Args:
        inner_steps: H.
        unequal: whether peers may differ; else every step counts for one.

    Ref: arXiv:2401.09135: steps_w = floor(v_w / v_max * H).
    """

    def __init__(self, inner_steps: int, *, unequal: bool) -> None:
        self._inner_steps, self._unequal = inner_steps, unequal
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._seen = 0
        self.fastest_s = 0.0  # an inner step of the fastest peer's; 0 at first
        self._published_s = self._rest = 0.0

    @property
    def step_s(self) -> float:
        """What an inner step takes here, as it is published; 0 at first."""
        own_s = self._own_s
        if abs(own_s - self._published_s) > _NEWS * self._published_s:
            self._published_s = own_s
        return self._published_s

    @property
    def steps_per_period(self) -> int:
        """H of this peer."""
        own_s = self._own_s
        if not (self._unequal and own_s and self.fastest_s):
            return self._inner_steps
        speed = self.fastest_s / own_s
        return self._inner_steps if speed >= _ALIKE else max(1, int(speed * self._inner_steps))

    def stepped(self, seconds: float) -> None:
        """Takes the time of an inner step."""
        self._seen += 1
        if self._seen > _FIRST_STEPS:
            self._seconds.append(seconds)

    def stride(self) -> int:
        """Steps of the schedule that the next inner step counts for, at least 1."""
        ahead = self._inner_steps / self.steps_per_period + self._rest
        whole = math.floor(ahead + 1e-9)
        self._rest = max(0.0, ahead - whole)
        return whole

    @property
    def _own_s(self) -> float:
        return statistics.median(self._seconds) if self._seconds else 0.0
