"""A model and an optimizer of the user's, as the outer loop sees them."""

import gc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from murmuration.algorithms.fragments import TensorSpec
from murmuration.worker.errors import UsageError
from murmuration.worker.library.steps import OptimizerSteps, StepListener, is_scaled
from murmuration.worker.training import model as models
from murmuration.worker.training.replica import Replica
from murmuration.worker.wire import tensor_hash

_SOME = 64  # values of a tensor


class UserReplica(Replica):
    """The user's model and optimizers. train thread only. Raises UsageError: nothing to train, or
    an optimizer of something else. Args: model: fp32, bf16 or fp16, on any device; optimizers: over
    its parameters and no others; their steps follow one another in this order."""

    def __init__(self, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        given = optimizers_of(model, optimizers)
        check_tensors(model)
        super().__init__(model, [_innermost(each) for each in given])
        self._buffers = _places(model)
        whole = [p for p in self._named.values() if p.is_floating_point() and not is_sharded(p)]
        self._looked_at = [*sorted(whole, key=lambda p: p.dim() < 2)[:1], *whole[-1:]]
        self.mark()
        self._averaged: dict[int, tuple[int, int]] = {}  # gradients: by parameter, and as of when
        self._frozen: set[str] | None = None  # all the time since it was asked
        self._check()

    @property
    def last_gradient_norm(self) -> float | None:
        """The norm that the optimizer has stepped with. None where to ask would cost a wait (on a
        GPU) or a word of all ranks (sharded), and where it is still scaled."""
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        dear = any(g.device.type != "cpu" or g.is_sparse or is_sharded(g) for g in gradients)
        if dear or not gradients or is_scaled(self.optimizers):
            return None
        return float(nn.utils.get_total_norm(gradients))

    @property
    def schema(self) -> list[TensorSpec]:
        return models.schema_of(self.model)

    @property
    def frozen_hash(self) -> str | None:
        """The hash of what is not trained, if anything. All ranks must ask at once."""
        known = {id(parameter) for parameter in self._named.values()}
        frozen: list[Any] = [p.detach() for p in self.model.parameters() if id(p) not in known]
        if not frozen:
            return None
        wholes = (p.full_tensor() if is_sharded(p) else p for p in frozen)
        reals = (torch.view_as_real(p) if p.is_complex() else p for p in wholes)
        return tensor_hash(p.to("cpu", torch.float32).flatten() for p in reals)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Zeros where there is none, and running statistics. Raises UsageError: one is sparse, or
        scaled."""
        if is_scaled(self.optimizers):
            raise UsageError(
                "preset ddp averages gradients, which a GradScaler has scaled here: call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        for name, parameter in self._named.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"parameter {name!r} has a sparse gradient, which preset ddp cannot average; "
                    "use sparse=False, or another preset"
                )
        return self._present_gradients()

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            given = gradients[name]
            if parameter.grad is None:
                parameter.grad = given.to(parameter).clone()
            elif parameter.grad is not given:
                parameter.grad.copy_(given)
        for name, statistic in self._statistics.items():
            statistic.copy_(gradients[name])
        self._averaged = {id(p): _as_of(p) for p in self._named.values()}

    def check_averaged(self, optimizer: Optimizer) -> None:
        """Raises UsageError."""
        given = (p for group in optimizer.param_groups for p in group["params"])
        if any(self._averaged.get(id(p), _as_of(p)) != _as_of(p) for p in given):
            raise UsageError(
                "preset ddp averages the gradients of all optimizers at once, before the first of "
                "them steps: call backward for all before, or take another preset"
            )

    def followed(self, listener: StepListener) -> AbstractContextManager[OptimizerSteps]:
        """Raises UsageError: it is followed already."""
        return OptimizerSteps(self.optimizers, map(id, self._named.values()), listener).followed()

    @property
    def schedule_free(self) -> list[Optimizer]:
        """The optimizers whose `eval()` writes other values into the model."""
        return [each for each in self.optimizers if hasattr(each, "eval")]

    @property
    def is_kept_twice(self) -> bool:
        """Tells whether an optimizer keeps parameters' values too: its next step writes these. One
        that is schedule-free goes on from the model's."""
        states = [pair for each in self.optimizers for pair in each.state.items()]
        whole = [(p, state) for p, state in states if not is_sharded(p) and bool(p.any())]
        if not whole or self.schedule_free:
            return False
        largest, state = max(whole, key=lambda pair: pair[0].numel())
        kept = (v for key, v in state.items() if isinstance(v, Tensor) and key != "ax")  # ASGD's
        others = (v for v in kept if v.data_ptr() != largest.data_ptr())
        return any(torch.equal(v.to(largest), largest) for v in others)

    def mark(self) -> None:
        """Keeps some values of parameters, for `written` and `copies`."""
        self._marked = self._some_values()

    @property
    def has_gradients(self) -> bool:
        """Tells whether a backward pass has come after what was noted, and its gradients stay."""
        pairs = zip(self._looked_at, self._used, strict=True)
        new = [p.grad for p, used in pairs if p.grad is not None and _as_of(p) != used]
        return any(0 < float(g.abs().max()) < inf for g in new if g.layout is torch.strided)

    def copies(self) -> int:
        """Counts the parameters of this process that still have a matrix's values as marked."""
        first = self._looked_at[0] if self._looked_at else self._marked
        some = self._marked[: first.numel()][:_SOME]
        here = _some_of(first).to(some)
        if first.dim() < 2 or not (some != some[:1]).any() or torch.equal(here, some):
            return 0
        alike = (t for t in gc.get_objects() if type(t) is nn.Parameter and t.shape == first.shape)
        whole = (t for t in alike if t.dtype.is_floating_point and t.layout is torch.strided)
        held = (t for t in whole if not t.is_meta and t.untyped_storage().nbytes())
        return sum(torch.equal(_some_of(each).to(some), some) for each in held)

    def written(self) -> Tensor:
        """Tells whether these have changed since, by more than a cast does. Waits for no device."""
        far = (self._some_values() - self._marked).abs() > 0.01 * self._marked.abs() + 1e-5
        return far.any()

    def _some_values(self) -> Tensor:
        some = [_some_of(each) for each in self._looked_at]
        return torch.cat(some) if some else torch.zeros(0, dtype=torch.float32, device="cpu")

    def refresh(self) -> None:
        """Follows what the model holds now. Raises UsageError: what travels is not what it was."""
        known = {id(parameter) for parameter in self._named.values()}
        present = {id(p): (name, p.requires_grad) for name, p in self.model.named_parameters()}
        new = [n for each, (n, trains) in present.items() if trains and each not in known]
        if new or not known <= present.keys():
            what = "one was taken away): remove, or merge adapters, after the block"
            if new:
                what = f"{new[0]!r} was added or thawed): build the model before `with Swarm(...)"
                what += "`, and let all that ever trains require a gradient then"
            raise UsageError(f"the parameters to train have changed in the swarm ({what}")
        self.note()
        held, statistics = _places(self.model), self._statistics
        if held != self._buffers:  # a module may assign a buffer anew at each step
            statistics = models.running_statistics(self.model)
        if other := statistics.keys() ^ self._statistics.keys():
            raise UsageError(
                f"the buffers of the model have changed in the swarm ({min(other)!r} is new or "
                "gone): register those that are saved before `Swarm(...)`, or persistent=False"
            )
        self._buffers, self._statistics = held, statistics
        for name, value in (*self._named.items(), *statistics.items()):
            before, now = self.parameters[name], value.detach()
            if before.dtype != now.dtype:
                models.check_types(self.model)
            if (before.shape, before.device) != (now.shape, now.device):
                what = f"{now.device} {[*now.shape]}, it was {before.device} {[*before.shape]}"
                raise UsageError(
                    f"{name!r} has become another tensor in the swarm ({what}): give the model its "
                    "final shape and device before `Swarm(...)`"
                )
            self.parameters[name] = now

    def note(self) -> None:
        """Notes what is frozen as an optimizer steps, and the gradients that steps have."""
        self._used = [_as_of(each) for each in self._looked_at]
        frozen = {name for name, parameter in self._named.items() if not parameter.requires_grad}
        self._frozen = frozen if self._frozen is None else self._frozen & frozen

    def take_frozen(self) -> set[str]:
        """The parameters that are frozen in the swarm, whenever noted since the last call."""
        frozen, self._frozen = self._frozen or set(), None
        return frozen

    def _check(self) -> None:
        name = type(self.model).__name__
        if not any(True for _ in self.model.parameters()):
            raise UsageError(f"model {name} has no parameters, so there is nothing to train")
        if not self._named:
            raise UsageError(
                f"model {name}: every parameter is frozen; let what is to be trained require a "
                "gradient"
            )
        if not self.optimizers:
            raise UsageError("no optimizer was given: the swarm follows the steps of one or more")
        groups = [group for each in self.optimizers for group in each.param_groups]
        if not any(group["params"] for group in groups):
            raise UsageError("the optimizer has no parameters: make it of model.parameters()")
        own = {id(parameter) for parameter in self.model.parameters()}
        if foreign := sum(id(p) not in own for group in groups for p in group["params"]):
            raise UsageError(
                f"the optimizer has {foreign} parameters that are not model {name}'s: make it of "
                "model.parameters(), after the model has its final form and device; of several "
                "models make one, torch.nn.ModuleList([...])"
            )
        models.check_types(self.model)


def _places(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Tells the buffers from others of the same names."""
    found = {}
    for name, buffer in model.named_buffers():
        dense = buffer.layout is torch.strided and not is_sharded(buffer)
        found[name] = (id(buffer), buffer.data_ptr() if dense else 0)
    return found


def _some_of(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:_SOME].float()


def _as_of(parameter: Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose step runs last, of what accelerate and others wrap."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def optimizers_of(model: object, given: Any) -> list[Optimizer]:
    """Gives one or several, as a list. Raises UsageError: one is none, or the model is none."""
    if isinstance(model, Optimizer):
        raise UsageError("the model comes first: Swarm(model, optimizer)")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is {_kind(model)}; give a torch.nn.Module (several as a torch.nn.ModuleList)"
        )
    several = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    found = list(given) if several else [given]
    for each in found:
        if not isinstance(each, Optimizer) or not hasattr(each, "state"):
            raise _no_optimizer(each)
    if len({id(each) for each in found}) < len(found):
        raise UsageError("optimizer: one is given twice; give each once, in the order of the steps")
    return found


def _no_optimizer(given: object) -> UsageError:
    says = "make one, such as torch.optim.AdamW(model.parameters())"
    if isinstance(given, LRScheduler):
        says = "give its .optimizer; the scheduler stays in your loop"
    elif isinstance(given, Mapping):
        says = "give its optimizers as a list"
    elif isinstance(given, Optimizer):
        says = "call super().__init__(params, defaults) in that of its class"
    elif hasattr(given, "unscale_"):
        says = "give the optimizer; the scaler stays in your loop"
    return UsageError(f"optimizer is {_kind(given)}, no torch.optim.Optimizer; {says}")


def _kind(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str | None) else f"of type {type(given).__name__}"


def check_tensors(model: nn.Module) -> None:
    """Raises UsageError: a tensor that would travel has no values, or not in the plain layout."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name!r} is of a lazy module and has no shape yet: run a batch through the model "
                "first, and make the optimizer after it"
            )
    for name, tensor in (*models.saved_buffers(model).items(), *model.named_parameters()):
        if (problem := _unfit(tensor)) is not None:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise UsageError(f"{kind} {name!r} {problem}")


def _unfit(tensor: Tensor) -> str | None:
    instead = "keep it at home, as a buffer with persistent=False"
    if tensor.is_meta:
        return "is on the device meta, without values: load the model before `with Swarm(...)`"
    if tensor.is_quantized:
        return f"is quantized: quantize the model after training, or {instead}"
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"has the layout {layout}: make it dense, or {instead}"
    if tensor.is_inference():
        return "was made in torch.inference_mode, which nothing can write to: make it outside"
    return None
