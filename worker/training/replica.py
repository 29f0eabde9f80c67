"""The work of a peer by itself: inner steps, and how far each takes it in the schedule."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from murmuration.algorithms.plan import Plan
from murmuration.worker.tasks import Cursor, SchedulesItself, Task, next_batch
from murmuration.worker.training.device import device_of, moved
from murmuration.worker.training.mailbox import IterationOver, StageJob
from murmuration.worker.training.model import running_statistics, trained_parameters
from murmuration.worker.training.optimizers import InnerConfig, advance, inner_optimizers, rates_of
from murmuration.worker.wire import are_finite

if TYPE_CHECKING:
    from murmuration.worker.library.site import Site

_REMEMBERED_STEPS = 16
_FIRST_STEPS = 4  # slower than the rest: the machine warms up
_ALIKE = 0.9  # of the fastest peer's speed, and above, is as fast: speeds are measured with noise
_NEWS = 0.1  # a change of the own step time that is published
_GROUPS = "groups"
# Of those what no checkpoint keeps: it is the schedule's and the machine's.
_SET_ANEW = {"params", "lr", "initial_lr", "fused", "foreach", "capturable"}
_STILL_S, _STILL = 5.0, 0.1  # of a peer that stood still, at least; of a period's time


class Replica:
    """A model that is trained, and its optimizers, as the outer loop sees them. train thread only.
    Attributes: loss: of the last step; NaN where there is none."""

    accessor: "Site | None" = None  # of parameters that other processes hold in part
    tokens_per_sample: int | None = None  # None where the task does not say

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers, self.loss = model, optimizers, math.nan
        self._named = trained_parameters(model)
        self._statistics = running_statistics(model)
        named = (*self._named.items(), *self._statistics.items())
        # Local ones and statistics by name, detached: writing changes the model.
        self.parameters: dict[str, Tensor] = {name: value.detach() for name, value in named}

    @property
    def samples(self) -> int | None:
        """How many are drawn in its stream; None where the loop is the user's own."""
        return None

    @property
    def learning_rate(self) -> float | None:
        """The last step's, of the first group of parameters; None where there is none."""
        return next(rates_of(self.optimizers), None)

    @property
    def last_gradient_norm(self) -> float | None:
        """The norm of the last step's gradient before it is clipped (in a user's loop after; None
        where to ask would cost something). Computed where nothing has measured it."""
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else None

    def handle(self, message: StageJob | IterationOver) -> None:
        """Takes a job for a stage; a whole model has none to do for others."""

    @property
    def moments_are_finite(self) -> bool:
        """Tells whether what optimizers remember is finite: else steps lead nowhere."""
        kept = ((p, e) for o in self.optimizers for p, s in o.state.items() for e in s.values())
        return are_finite(
            each
            for parameter, each in kept
            if (type(each) is Tensor or hasattr(each, "to_local"))  # who knows what others can do
            and each.is_floating_point()
            and each.shape == parameter.shape
        )

    def reset_moments(self) -> None:
        """Forgets what the optimizers know, after it has led astray; on a site all ranks do."""
        if self.accessor is not None:
            self.accessor.reset_moments()
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def _present_gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter, zeros where there is none; and copies of the running statistics,
        which are averaged too."""
        found = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._named.items()
        }
        return found | {n: s.clone() for n, s in self._statistics.items()}


class RunIsOver(Exception):
    """The run has ended while a batch was waited for."""


class InnerReplica(Replica):
    """One peer's model, inner optimizer and place in its stream of samples. train thread only."""

    def __init__(
        self, task: Task, model: nn.Module, config: InnerConfig, cursor: Cursor, steps: int
    ) -> None:
        super().__init__(model, inner_optimizers(task, trained_parameters(model), config))
        self.cursor = cursor
        self._task, self._config, self._steps = task, config, steps
        self.batches = task.batches("train", cursor)
        self._schedulers = [
            task.scheduler(each) for each in self.optimizers if isinstance(task, SchedulesItself)
        ]
        self._peaks = [[g.get("lr", 0.0) for g in each.param_groups] for each in self.optimizers]
        self.lr_factor, self._scheduled = 1.0, 0
        self._norm: Tensor | None = None  # before clipping
        self._device = device_of(model)

    @property
    def tokens_per_sample(self) -> int | None:  # type: ignore[override]  # a task may say it late
        return getattr(self._task, "tokens_per_sample", None)

    @property
    def samples(self) -> int | None:
        return self.cursor.position

    @property
    def last_gradient_norm(self) -> float | None:
        return None if self._norm is None else float(self._norm)

    def backward(self, step: int) -> Mapping[str, Tensor]:
        """Mean gradients of `accumulate` batches, and the statistics; sets `loss` and `cursor`."""
        for parameter in self._named.values():
            parameter.grad = None
        losses = []
        for _ in range(self._config.accumulate):
            batch = moved(next_batch(self.batches, "train"), self._device)
            with self._precision():
                loss = self._task.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.cursor = batch.cursor
            losses.append(loss.item())
        self.loss = statistics.fmean(losses)
        if self._config.accumulate > 1:
            for parameter in self._named.values():
                if parameter.grad is not None:
                    parameter.grad /= self._config.accumulate
        return self._present_gradients()

    def _precision(self) -> AbstractContextManager[object]:
        if self._config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            parameter.grad = gradients[name].to(parameter)  # a mean comes in fp32, on the host
        for name, statistic in self._statistics.items():
            if name in gradients:
                statistic.copy_(gradients[name])
        self._norm = nn.utils.clip_grad_norm_(self._named.values(), self._config.clip or math.inf)
        self._schedule_to(step - 1)  # where another peer's word has moved the step
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            if not self._schedulers:
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = self._config.lr_at(step, self._steps, peak * self.lr_factor)
            optimizer.step()
        for parameter in self._named.values():
            parameter.grad = None  # a round of an exchange takes the memory
        self._schedule_to(step)

    def _schedule_to(self, step: int) -> None:
        for scheduler in self._schedulers:
            advance(scheduler, step - self._scheduled)
        self._scheduled = max(self._scheduled, step)

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state of optimizers by `parameter/key`, and of `groups` of parameters, such as
        Prodigy's `d`: (their own tensors, other plain values)."""
        names = {id(parameter): name for name, parameter in self._named.items()}
        found = {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self.optimizers
            for parameter, remembered in optimizer.state.items()
            for key, value in remembered.items()
        }
        tensors = {place: value for place, value in found.items() if isinstance(value, Tensor)}
        values = {place: value for place, value in found.items() if place not in tensors}
        values[_GROUPS] = [
            {k: v for k, v in group.items() if k not in _SET_ANEW and isinstance(v, int | float)}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        return tensors, values

    def restore_optimizers(self, remembered: Mapping[str, Any], steps: int) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()
        owners = {
            id(p): (each, group)
            for each in self.optimizers
            for group in each.param_groups
            for p in group["params"]
        }
        groups = (group for each in self.optimizers for group in each.param_groups)
        for group, kept in zip(groups, remembered.get(_GROUPS, ()), strict=False):
            group.update(kept)
        for place, held in ((p, v) for p, v in remembered.items() if p != _GROUPS):
            value = held.clone() if isinstance(held, Tensor) else held  # it may be mapped
            name, _, key = place.rpartition("/")
            parameter = self._named[name]
            owner, group = owners[id(parameter)]
            # A count of steps is a tensor on the host, but where the kernel itself reads it.
            read_there = group.get("fused") or group.get("capturable")
            if isinstance(value, Tensor) and (value.dim() or read_there):
                value = value.to(parameter.device)
            owner.state[parameter][key] = value
        self._schedule_to(steps)


class Pace:
    """How far in the schedule one inner step takes this peer (DyLU).

    A peer at half the speed of the fastest makes half as many inner steps in a period, each of
    which counts for two in the schedule; so rounds are due everywhere at about the same time.

    Args: plan: of H inner steps, which count for one each where peers do not go by speed.

    Ref: arXiv:2401.09135: steps_w = floor(v_w / v_max * H)."""

    def __init__(self, plan: Plan) -> None:
        self._inner_steps, self._unequal = plan.inner_steps, plan.dylu
        self._waits_for_nobody = plan.waits_for_nobody
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._seen = 0
        self.fastest_s = 0.0  # an inner step, as `View.fastest_step_s` has it; 0 at first
        self._published_s = self._rest = 0.0
        self._missed = 0  # rounds, one after another
        self._counted_at: float | None = None  # the last round; -inf: it has another's state
        self._since = 0  # inner steps
        self._resumed = False  # from a checkpoint, and no round has closed here since

    @property
    def step_s(self) -> float:
        """Seconds that an inner step takes here, as they are published; 0 at first."""
        own_s = self._own_s
        if abs(own_s - self._published_s) > _NEWS * self._published_s:
            self._published_s = own_s
        return self._published_s

    def stepped(self, seconds: float) -> None:
        self._seen += 1
        self._since += 1
        if self._seen > _FIRST_STEPS:
            self._seconds.append(seconds)

    def stride(self) -> int:
        """Steps of the schedule that the next inner step counts for, at least 1."""
        own_s, per_period = self._own_s, self._inner_steps
        if self._unequal and own_s and 0 < (speed := self.fastest_s / own_s) < _ALIKE:
            per_period = max(1, int(speed * self._inner_steps))
        ahead = self._inner_steps / per_period + self._rest
        whole = math.floor(ahead + 1e-9)
        self._rest = max(0.0, ahead - whole)
        return whole

    def lags(self, now: float, behind: int) -> bool:
        """Tells whether this peer is behind by what no inner step has taken. It stood still since
        its last round that counted, or has gone on from another's state or from a checkpoint. Args:
        behind: most of the others, in steps of the schedule."""
        if self._resumed:
            still_s = behind * self._own_s
        elif self._counted_at is None:
            return False
        else:
            still_s = now - self._counted_at - self._since * self._own_s
        return still_s > max(_STILL_S, _STILL * self._inner_steps * self._own_s)

    def resumes(self) -> None:
        """It goes on from a checkpoint. If all do, none is far behind the others."""
        self._resumed = self._counted_at is None

    def took_over(self) -> None:
        """It goes on from another's state, and from where that one was in the schedule. So the
        round that is on its way, which does without it, makes it no earlier."""
        self._counted_at, self._resumed, self._missed = -math.inf, False, -1

    def round_closed(self, now: float, *, counted: bool) -> None:
        """A round has closed, with this peer's part or without. Without, it goes on further in the
        schedule (docs/adr/0043): by a quarter of a period, then by half."""
        if counted:
            self._counted_at, self._since, self._resumed = now, 0, False
        self._missed = 0 if counted or not self._waits_for_nobody else self._missed + 1
        if self._missed > 0:
            self._rest += self._inner_steps * min(0.25 * self._missed, 0.5)

    @property
    def _own_s(self) -> float:
        return statistics.median(self._seconds) if self._seconds else 0.0
