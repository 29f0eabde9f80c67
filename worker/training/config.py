"""The sections [inner] and [checkpoint] of a run's TOML."""

import math
from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Args: every_s: seconds between two checkpoints; keep: how many stay (at least 2)."""

    every_s: float = 30.0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise ValueError(f"every_s is {self.every_s}; it must be above 0")
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; it must be at least 2, one to fall back on")
