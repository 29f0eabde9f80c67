"""The layers of one stage on the train thread: the jobs of stage calls, and their summed gradient.

A backward computes its stage's forward again from the stage's input, which the caller keeps. So
does the origin's last job of a microbatch with the loss: only then it has come back, and counts.
"""

import heapq
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.worker import wire
from murmuration.worker.config import Config
from murmuration.worker.errors import ConfigError
from murmuration.worker.tasks import Batch, Cursor, StageModule, Task, next_batch
from murmuration.worker.training import mailbox as mail
from murmuration.worker.training.outer import OuterLoop
from murmuration.worker.training.replica import InnerReplica

_BACKWARDS = (mail.JobKind.BACKWARD, mail.JobKind.LEAVE, mail.JobKind.LOSS)


class StageReplica(InnerReplica):
    """A replica of one stage; its module is the stage's alone. train thread only. Backwards add to
    the sum of gradients in place. Raises ConfigError, from `work`: a microbatch takes more memory
    than calls may. Args: begins: whether microbatches begin here, on stage 0; answer: hears of done
    jobs."""

    def __init__(
        self,
        task: Task,
        module: StageModule,
        config: Config,
        cursor: Cursor,
        answer: Callable[[mail.StageJobDone], None],
        *,
        begins: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(task, module, config.inner, cursor, config.run.steps)
        self._module, self._answer, self._clock = module, answer, clock
        self._codec = codec_by_name(config.stages.activations)
        self._limit_bytes = config.stages.memory_bytes
        self._microbatches = config.stages.microbatches if begins else 0
        self.iteration = 0
        self._served = 0  # the latest iteration that is counted here
        self._jobs: list[tuple[bool, int, mail.StageJob]] = []
        self._batches_here: list[Batch] = []
        self._returned: dict[int, tuple[memoryview, tuple[int, ...]]] = {}
        self._losses: list[float] = []
        self._over: mail.IterationOver | None = None
        self._spoiled = False  # a part of a gradient is in the sum
        self._counted: set[int] = set()  # the microbatches whose gradient is in the sum
        self._sums = {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            for name, parameter in self._named.items()
        }
        self.visits, self.gradient_norm = 0, 0.0

    @property
    def samples(self) -> int | None:
        """Drawn so far; None where no microbatches begin."""
        return self.cursor.position if self._microbatches else None

    def begin(self, iteration: int) -> None:
        """Goes on to this iteration; whatever was counted for another one is forgotten."""
        self.iteration, self._over, self._spoiled = iteration, None, False
        self._clear()
        for name, parameter in self._named.items():
            parameter.grad = self._sums[name]
        self._losses.clear()
        self._returned.clear()
        self._batches_here = [next_batch(self.batches, "train") for _ in range(self._microbatches)]
        if self._batches_here:
            self.cursor = self._batches_here[-1].cursor

    def handle(self, message: mail.StageJob | mail.IterationOver) -> None:
        """A job, or word that there will be no more of them in an iteration."""
        if isinstance(message, mail.StageJob):
            heapq.heappush(self._jobs, (message.kind not in _BACKWARDS, message.number, message))
        elif message.iteration >= self.iteration:
            self._over = message

    @property
    def over(self) -> bool:
        """Tells whether all microbatches of the iteration are counted."""
        return self._over is not None and self._over.iteration >= self.iteration

    def serve(self, loop: OuterLoop, mailbox: mail.Mailbox) -> float:
        """Does jobs until every microbatch of the loop's step has come back, or another peer's
        state was taken over, in which the iteration is done. Returns how long it waited (s)."""
        waited_s = 0.0
        if loop.step <= self._served:  # back in the schedule: a step taken here has it
            self.begin(loop.step)
            return waited_s
        while not (self.iteration == loop.step and self.over) and loop.stopped is None:
            while (message := mailbox.poll()) is not None:
                loop.handle(message)
            if loop.moved:
                break
            if self.iteration != loop.step:
                self.begin(loop.step)
                mailbox.post(mail.IterationStarted(loop.step, self.gradient_norm))
            elif not self.over and not self.work():
                started = self._clock()
                loop.handle(mailbox.wait())
                waited_s += self._clock() - started
        if loop.stopped is None and not loop.moved:
            self._served = loop.step
        return waited_s

    def work(self) -> bool:
        """Does the most urgent job of this iteration; False when there is none."""
        later, found = [], None
        while self._jobs and found is None:
            job = (entry := heapq.heappop(self._jobs))[2]
            if job.iteration > self.iteration:
                later.append(entry)
            elif job.iteration < self.iteration:
                self._answer(mail.StageJobDone(job.number, problem="the iteration is over"))
            else:
                found = job
        for entry in later:
            heapq.heappush(self._jobs, entry)
        if found is None:
            return False
        began = self._clock()
        try:
            values, shape = self._do(found)
            seconds = self._clock() - began
            worked = mail.StageJobDone(found.number, values, seconds, shape=shape)
        except Exception as error:  # whatever torch raises for what another peer has sent
            if found.kind is mail.JobKind.ENTER:  # this peer's own
                raise
            left_out = "; this iteration's gradient is left out" if self._spoiled else ""
            problem = f"{found.kind.name.lower()}: {error}{left_out}"
            worked = mail.StageJobDone(found.number, problem=problem, failed=True)
        self._answer(worked)
        return True

    def backward(self, step: int) -> Mapping[str, Tensor]:
        """The mean gradient over the visits of the iteration; zeros where there was none."""
        if self._spoiled or (self._over is not None and self._over.discard):
            self._clear()
        self.visits = len(self._counted)
        self.loss = statistics.fmean(self._losses) if self._losses else math.nan
        for value in self._sums.values():
            value /= max(1, self.visits)
        squares = (float(value.square().sum()) for value in self._sums.values())
        self.gradient_norm = math.sqrt(sum(squares))
        # The sums are given away, not copied: the next iteration begins with zeros in their place.
        return dict(self._sums)

    def _clear(self) -> None:
        self._counted.clear()
        for value in self._sums.values():
            value.zero_()

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Does nothing where nothing has visited the stage: zeros would move it by its momentum."""
        if any(bool(gradient.any()) for gradient in gradients.values()):
            super().inner_step(step, gradients)

    def _do(self, work: mail.StageJob) -> tuple[memoryview, tuple[int, ...]]:
        match work.kind:
            case mail.JobKind.ENTER:
                with torch.no_grad():
                    hidden = self._module(self._module.embed(self._batches_here[work.microbatch]))
                values = self._encode(hidden)
                if len(values) > self._limit_bytes:
                    raise ConfigError(
                        "[stages] memory_mib: the activations of one microbatch take "
                        f"{len(values) / 2**20:.0f} MiB and nobody would accept them; raise "
                        "memory_mib on every machine, or make batches smaller"
                    )
                return values, tuple(hidden.shape)
            case mail.JobKind.FORWARD:
                with torch.no_grad():
                    hidden = self._module(self._decode(work.values, work.shape))
                return self._encode(hidden), work.shape
            case mail.JobKind.LOSS:  # its input is kept until it leaves
                hidden = self._decode(work.values, work.shape).requires_grad_()
                loss = self._module.loss(hidden, self._batches_here[work.microbatch])
                (gradient,) = torch.autograd.grad(loss, [hidden])
                self._returned[work.microbatch] = (work.values, work.shape)
                return self._encode(gradient), work.shape
            case mail.JobKind.BACKWARD:  # gives that of the input; the others are summed once
                gradient = self._decode(work.gradient, work.shape)
                hidden = self._decode(work.values, work.shape).requires_grad_()
                output = self._module(hidden)
                if work.microbatch in self._counted:
                    (of_input,) = torch.autograd.grad(output, [hidden], gradient)
                    return self._encode(of_input), work.shape
                with self._adding(work.microbatch):
                    torch.autograd.backward([output], [gradient])
                    assert hidden.grad is not None, "a stage adds to what enters it"
                    returned = self._encode(hidden.grad)
                return returned, work.shape
            case mail.JobKind.LEAVE:
                self._leave(work)
                return mail.NO_VALUES, work.shape

    def _leave(self, work: mail.StageJob) -> None:
        """The microbatch has come back: adds its gradient of head, norm, embedding and layers."""
        if work.microbatch in self._counted:
            return
        if work.microbatch not in self._returned:
            raise ValueError(f"no loss was asked for of microbatch {work.microbatch}")
        batch = self._batches_here[work.microbatch]
        values, shape = self._returned[work.microbatch]
        gradient = self._decode(work.gradient, work.shape)
        with self._adding(work.microbatch):
            loss = self._module.loss(self._decode(values, shape), batch)
            torch.autograd.backward([loss])
            torch.autograd.backward([self._module(self._module.embed(batch))], [gradient])
        self._losses.append(loss.item())
        del self._returned[work.microbatch]

    @contextmanager
    def _adding(self, microbatch: int) -> Iterator[None]:
        """Around what adds a gradient to the sum. A failure leaves a part there: no sum counts."""
        self._spoiled, spoiled = True, self._spoiled
        yield
        self._spoiled = spoiled
        self._counted.add(microbatch)

    def _encode(self, values: Tensor) -> memoryview:
        return wire.encode(self._codec, values.detach().reshape(-1).contiguous())

    def _decode(self, raw: memoryview, shape: tuple[int, ...]) -> Tensor:
        return wire.decode(self._codec, raw, math.prod(shape)).view(shape)
