"""Inner optimizers by name: what `[inner] optimizer` may be, and their learning rates by step.

auto                the task's own `optimizer`, where it has one; else AdamW
adamw               decay of matrices, none of vectors
muon                Muon for the matrices of the layers, AdamW for the rest
sgd                 with Nesterov momentum
kseed               plain descent on the coefficients of directions (worker.training.kseed)
package:factory     called with the parameters
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from murmuration.algorithms.fragments import layer_of
from murmuration.worker.errors import UsageError
from murmuration.worker.tasks import OptimizesItself, Task, TaskError, import_factory

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of a quintic that takes singular values to about 1
_ITERATIONS = 5
_RMS = 0.2  # of AdamW's steps
SCHEDULES = ("cosine", "linear", "wsd", "constant")
KSEED = "kseed"
OPTIMIZERS = ("auto", "adamw", "muon", "sgd", KSEED)
_DECAYS = 0.2  # the share of the steps in which `wsd` decays


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The optimizer of each peer by itself; its moments never travel and are not reset.

    Ref: arXiv:2311.08105 section 3 (AdamW inside, cosine, weight decay 0.1)."""

    optimizer: str = "auto"  # one of `OPTIMIZERS`, or `package:factory`; see the head of this file
    lr: float = 3e-3  # peak learning rate
    warmup_steps: int = 80  # linear warm-up from 0
    schedule: str = "cosine"  # one of `SCHEDULES`
    min_lr_ratio: float = 0.1  # where it ends at the run's last step, as a share of `lr`
    accumulate: int = 1  # batches whose mean gradient is one inner step's
    weight_decay: float = 0.1  # of matrices; vectors (norms) are exempt
    beta1: float = 0.9  # AdamW's, as the next
    beta2: float = 0.95
    momentum: float = 0.95  # of muon and sgd
    clip: float = 1.0  # the largest norm of a gradient; 0 clips nothing
    precision: str = "fp32"  # of forward and backward, or `bf16`; parameters stay in fp32
    seeds: int = 4096  # of kseed: how many directions there are
    perturbation: float = 1e-3  # of kseed: how far along one of them two losses are compared

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


class Muon(Optimizer):
    """Momentum whose matrix is made orthogonal: every direction moves alike.

    torch's own, from 2.9 on, iterates in bf16 wherever it runs, which took ten times the backward
    pass on a CPU that has no bf16 units. This one does so on accelerators only. A step is scaled by
    the matrix's shape to the size of AdamW's, 0.2 sqrt(max(rows, columns)): both take one learning
    rate and one decay.

    Args:
        params: matrices, 2-D. Of more dimensions, as in a convolution, the first one is rows, and
            the others together are columns. Vectors go to another optimizer.
        lr: learning rate; weight_decay: decoupled; momentum: Nesterov's.

    >>> matrix = nn.Parameter(torch.zeros(2, 2))
    >>> muon = Muon([matrix], lr=0.1, momentum=0.0, weight_decay=0.0)
    >>> (matrix * torch.tensor([[3.0, 0.0], [0.0, 100.0]])).sum().backward()
    >>> _ = muon.step()  # both directions by about 0.1 * 0.2 * sqrt(2)
    >>> bool((matrix.diag() < -0.015).all() and (matrix.diag() > -0.04).all())
    True

    Ref: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; arXiv:2502.16982 (the
    scaling, section 2.2)."""

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: one is no matrix."""
        super().add_param_group(param_group)
        for each in self.param_groups[-1]["params"]:
            if each.dim() < 2 or not each.is_floating_point():
                kind = "complex" if each.is_complex() else f"{each.dim()}-D"
                raise UsageError(
                    f"Muon is for matrices: a parameter of shape {tuple(each.shape)} is {kind}; "
                    "give it to another optimizer, and both to Swarm: [muon, adamw]"
                )

    # torch declares two overloads, and mypy compares with each.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every matrix that has a gradient."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.is_sparse:
                    raise UsageError(
                        "Muon got a sparse gradient; say sparse=False, or use SparseAdam"
                    )
                state, momentum = self.state[parameter], group["momentum"]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                matrix = gradient.lerp(buffer, momentum).flatten(1)
                direction = orthogonal(matrix).reshape(parameter.shape)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = _RMS * math.sqrt(max(matrix.shape))
                parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"] * scale)
        return loss


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values of about 1 (0.7 to 1.2): (R, C), fp32 or bf16."""
    a, b, c = _NEWTON_SCHULZ
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[0] <= x.shape[1] else wide.T


def advance(scheduler: Any, times: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer has stepped in between
        for _ in range(times):
            scheduler.step()


def rates_of(optimizers: Iterable[Optimizer]) -> Iterator[float]:
    """Gives the learning rates of all groups of parameters that have one."""
    groups = (group for each in optimizers for group in each.param_groups)
    return (float(group["lr"]) for group in groups if group.get("lr") is not None)


def inner_optimizers(
    task: Task, named: Mapping[str, nn.Parameter], config: InnerConfig
) -> tuple[Optimizer, ...]:
    """Makes optimizers that together have each parameter once. Args: task: its own `optimizer` is
    taken with `auto`; named: what is trained. Raises TaskError: a factory that cannot be loaded, or
    makes something else."""
    parameters, momentum, decay = list(named.values()), config.momentum, config.weight_decay
    match config.optimizer:
        case "auto" if isinstance(task, OptimizesItself):
            return (_checked(task.optimizer(parameters), parameters, "the task's optimizer()"),)
        case "auto" | "adamw":
            return (_adamw(parameters, config),)
        case "muon":
            matrices = [p for n, p in named.items() if p.dim() == 2 and layer_of(n) is not None]
            if not matrices:
                raise TaskError(
                    "[inner] optimizer = 'muon': the model has no matrices in numbered layers, "
                    "which is what Muon is for; use adamw"
                )
            chosen = {id(p) for p in matrices}
            rest = [p for p in parameters if id(p) not in chosen]
            muon = Muon(matrices, lr=config.lr, momentum=momentum, weight_decay=decay)
            return (muon, _adamw(rest, config)) if rest else (muon,)
        case "sgd":
            groups, nesterov = _decayed(parameters), momentum > 0
            return (torch.optim.SGD(groups, config.lr, momentum, 0, decay, nesterov=nesterov),)
        case "kseed":
            return (torch.optim.SGD(parameters, lr=config.lr),)
        case name:
            made = import_factory(name, "optimizer")(parameters)
            return (_checked(made, parameters, f"[inner] optimizer = {name!r}"),)


def _decayed(parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """Groups: matrices, which decay, and vectors, which do not."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class AdamW(torch.optim.AdamW):
    """torch's, to the bit, without the code that hides it from torch's compiler: that code loads
    the compiler, which takes as long as to load all the rest of a worker."""

    add_param_group = unwrap(Optimizer.add_param_group)

    # torch declares two overloads, and mypy compares with each.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss: float | None = unwrap(torch.optim.AdamW.step)(self, closure)
        return loss


def _adamw(parameters: Sequence[nn.Parameter], config: InnerConfig) -> Optimizer:
    groups, betas, decay = _decayed(parameters), (config.beta1, config.beta2), config.weight_decay
    return AdamW(groups, lr=config.lr, betas=betas, weight_decay=decay, fused=True)


def _checked(made: object, parameters: Iterable[nn.Parameter], source: str) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise TaskError(f"{source} returned {type(made).__name__}; return a torch.optim.Optimizer")
    known = {id(p) for group in made.param_groups for p in group["params"]}
    if known != {id(p) for p in parameters}:
        raise TaskError(f"{source} is not over the parameters it was given, each of them once")
    return made
