"""The inner optimizer: AdamW with warm-up, cosine decay and gradient clipping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.tasks import Cursor, Task, next_batch


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """AdamW on each peer by itself; its moments never travel and are not reset.

    Args:
        lr: peak learning rate; warmup_steps: linear warm-up from 0; min_lr_ratio: where the cosine
            ends at the run's last step, as a share of `lr`.
        weight_decay: of matrices; vectors (norms) are exempt. beta1, beta2: AdamW's.
        clip: the largest norm of a gradient; 0 clips nothing.

    Ref: arXiv:2311.08105 section 3 (AdamW inside, cosine, weight decay 0.1).
    """

    lr: float = 3e-3
    warmup_steps: int = 80
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; it must be above 0")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.clip < 0:
            raise ValueError("warmup_steps, weight_decay and clip must be at least 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio is {self.min_lr_ratio}; it must be 0 to 1")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be in 0..1, below 1")

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of inner step `step` (from 1) of `steps`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)


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
