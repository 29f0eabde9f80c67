"""What a step of the run's model takes on this machine."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from murmuration.algorithms.utilization import Workload, workload_of
from murmuration.worker.pipeline.part import Part, part_of
from murmuration.worker.tasks import Cursor
from murmuration.worker.training.kseed import seed_space_of
from murmuration.worker.training.mailbox import Mailbox

if TYPE_CHECKING:
    from murmuration.worker.config import Config


def run_workload(config: "Config", step_s: float | None, threads: int) -> Workload:
    """The run's own task, timed where no time is given.

    With `kseed` it is the vector of coefficients that travels. Raises as `task_of` and `part_of`.
    """
    from murmuration.worker.config import task_of

    task = task_of(config)
    part = part_of(task, config)
    parameters = {n: p.numel() for n, p in part.module.named_parameters() if p.requires_grad}
    if step_s is None:
        step_s = _timed_step_s(config, task, part, threads)
    workload = workload_of(parameters, step_s)
    space = seed_space_of(part.module)
    return workload if space is None else replace(workload, ddp_parameters=space.elements)


def _timed_step_s(config: "Config", task: Any, part: Part, threads: int) -> float:
    """The median of some real inner steps, in seconds."""
    cursor = Cursor(seed=config.run.seed, stream="plan")
    replica = part.replica(task, config, cursor, Mailbox())
    numbers = itertools.count(1)

    def step() -> tuple[float]:
        began_s, number = time.perf_counter(), next(numbers)
        replica.inner_step(number, replica.backward(number))
        return (time.perf_counter() - began_s,)

    with torch_threads(threads):
        (step_s,) = medians(step, most=100, enough_s=1.0)
    return step_s


def medians(run: Callable[[], tuple[float, ...]], most: int, enough_s: float) -> list[float]:
    """Of the seconds that runs say they took, at least 3 and then until it is enough."""
    run()
    took_s: list[tuple[float, ...]] = []
    while len(took_s) < most and (len(took_s) < 3 or sum(map(sum, took_s)) < enough_s):
        took_s.append(run())
    return [statistics.median(each) for each in zip(*took_s, strict=True)]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Torch computes with this many meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
