"""The sections [inner] and [checkpoint] of a run's TOML."""

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "linear", "wsd", "constant")
KSEED = "kseed"
OPTIMIZERS = ("auto", "adamw", "muon", "sgd", KSEED)
_DECAYS = 0.2  # the share of the steps in which `wsd` decays


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The optimizer of each peer by itself; its moments never travel and are not reset.

    Args:
        optimizer: one of `OPTIMIZERS`, or `package:factory`; see `worker.training.optimizers`.
        lr: peak learning rate; warmup_steps: linear warm-up from 0; schedule: one of `SCHEDULES`;
            min_lr_ratio: where it ends at the run's last step, as a share of `lr`.
        accumulate: batches whose mean gradient is one inner step's.
        weight_decay: of matrices; vectors (norms) are exempt. beta1, beta2: AdamW's.
        momentum: of muon and sgd.
        clip: the largest norm of a gradient; 0 clips nothing.
        seeds, perturbation: of kseed: how many directions there are, and how far along one of them
            two losses are compared.
        precision: of forward and backward, `fp32` or `bf16`; parameters stay in fp32.

    Ref: arXiv:2311.08105 section 3 (AdamW inside, cosine, weight decay 0.1).
    """

    optimizer: str = "auto"
    lr: float = 3e-3
    warmup_steps: int = 80
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    accumulate: int = 1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    clip: float = 1.0
    precision: str = "fp32"
    seeds: int = 4096
    perturbation: float = 1e-3

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise ValueError(
                f"optimizer is {self.optimizer!r}; use {', '.join(OPTIMIZERS)}, or package:factory"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; use {', '.join(SCHEDULES)}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}; use fp32 or bf16")
        if self.seeds < 1 or not self.perturbation > 0:
            raise ValueError(
                f"seeds is {self.seeds} and perturbation {self.perturbation}; they must be at "
                "least 1, and above 0 (4096 and 1e-3 are usual)"
            )
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; it must be above 0")
        if self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate}; it must be at least 1")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.clip < 0:
            raise ValueError("warmup_steps, weight_decay and clip must be at least 0")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio is {self.min_lr_ratio}; it must be 0 to 1")
        if not all(0 <= each < 1 for each in (self.beta1, self.beta2, self.momentum)):
            raise ValueError("beta1, beta2 and momentum must be in 0..1, below 1")

    def lr_at(self, step: int, steps: int, peak: float | None = None) -> float:
        """Learning rate of inner step `step` (from 1) of `steps`; `peak` is `lr` if not given."""
        peak = self.lr if peak is None else peak
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        match self.schedule:
            case "constant":
                left = 1.0
            case "linear":
                left = 1 - done
            case "wsd":
                left = min(1.0, (1 - done) / _DECAYS)
            case _:
                left = 0.5 * (1 + math.cos(math.pi * done))
        return peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Args:
    every_s: seconds between two checkpoints; more where they would take 3 % of the time.
    keep: how many stay (at least 2).
    """

    every_s: float = 30.0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every_s <= 0:
            raise ValueError(f"every_s is {self.every_s}; it must be above 0")
        if self.keep < 2:
            raise ValueError(f"keep is {self.keep}; it must be at least 2, one to fall back on")
