"""Trains and measures what the baselines train: one worker process's part.

The model, the samples, the inner optimizer, the outer settings and the held-out loss are those of
`murmur swarm --preset diloco`, by the same code. Only the exchange differs, and is given as a
function.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmuration.algorithms.fragments import TensorSpec, partition
from murmuration.algorithms.plan import PRESETS
from murmuration.worker.tasks import Cursor, load_task
from murmuration.worker.training.evaluation import validate
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica
from murmuration.worker.wire import tensor_hash
from tests.lab.peers.network import interface_of, sent_bytes

PLAN = PRESETS["diloco"]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options that the launcher gives a worker."""

    rank: int
    workers: int
    address: str
    steps: int
    inner_steps: int
    seed: int

    @property
    def name(self) -> str:
        """The peer's name and that of its stream of samples, as `murmur swarm` gives them."""
        return f"w{self.rank}"

    @classmethod
    def parse(cls) -> "WorkerOptions":
        """From the command line; only the launcher writes it."""
        parser = argparse.ArgumentParser()
        for name in ("rank", "workers", "steps", "inner-steps", "seed"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--address", required=True)
        return cls(**vars(parser.parse_args()))


@dataclass
class Metrics:
    """Seconds and rounds, counted as the `murmur` worker counts them.

    `wall_s` ends with the last inner step, before the round that follows it; `stall_s` has that
    round too, and failed ones."""

    first_step_at: float = math.nan
    last_step_at: float = math.nan
    compute_s: float = 0.0
    stall_s: float = 0.0
    rounds_completed: int = 0
    rounds_failed: int = 0

    def plain(self) -> dict[str, Any]:
        """Under the keys of murmur's report."""
        wall_s = self.last_step_at - self.first_step_at
        return {
            "wall_s": round(wall_s, 3),
            "compute_s": round(self.compute_s, 3),
            "stall_s": round(self.stall_s, 3),
            "compute_utilization": round(self.compute_s / wall_s, 4),
            "rounds_completed": self.rounds_completed,
            "rounds_failed": self.rounds_failed,
        }


class Training:
    """One worker's model, inner optimizer and samples, with a clock on them.

    Create it before anything of torchft's or hivemind's: its hook on the inner optimizer must run
    before theirs, since it marks where computing ends and exchanging begins.

    Attributes:
        waited_s: how long the step's gradients have just been waited for, in its backward pass."""

    waited_s: Callable[[], float] = staticmethod(lambda: 0.0)

    def __init__(self, options: WorkerOptions) -> None:
        self.options, self.metrics = options, Metrics()
        self.task = load_task("llama-bytes", seed=options.seed)
        self.model = self.task.model()
        cursor = Cursor(seed=options.seed, stream=options.name)
        self.replica = InnerReplica(self.task, self.model, InnerConfig(), cursor, options.steps)
        (self.optimizer,) = self.replica.optimizers
        self.optimizer.register_step_post_hook(self._inner_step_done)
        schema = [TensorSpec(n, tuple(p.shape)) for n, p in self.replica.parameters.items()]
        (self.fragment,) = partition(schema, fragments=1)
        self._interface = interface_of(options.address)
        self._sent_before = sent_bytes(self._interface)
        self._inner_done_at = math.nan

    def _inner_step_done(self, *_: object) -> None:
        self._inner_done_at = time.monotonic()

    def run(self, exchange: Callable[[], bool]) -> None:
        """Trains to the last step.

        Args:
            exchange: called after every H inner steps; ends the round, and says whether it came to
                anything. What an optimizer's hook does of it earlier counts as stall as well."""
        metrics, options = self.metrics, self.options
        metrics.first_step_at = time.monotonic()
        for step in range(1, options.steps + 1):
            started = time.monotonic()
            gradients = self.replica.backward(step)
            waited_s = self.waited_s()
            self.replica.inner_step(step, gradients)
            metrics.last_step_at = self._inner_done_at
            metrics.compute_s += self._inner_done_at - started - waited_s
            if step % options.inner_steps == 0:
                if exchange():
                    metrics.rounds_completed += 1
                else:
                    metrics.rounds_failed += 1
                metrics.stall_s += waited_s + time.monotonic() - self._inner_done_at

    def report(
        self, anchor: Tensor, momentum: Tensor, system: str, rounds_partial: int = 0
    ) -> None:
        """Evaluates the anchor and says everything in one line; leaves the model with the anchor.

        Args:
            anchor, momentum: the outer state, flat, in the fragment's order.
            system: what was measured, with its settings.
            rounds_partial: completed rounds whose mean lacked somebody's part, here; none where
                an all-reduce is whole or fails."""
        sent = sent_bytes(self._interface) - self._sent_before
        self.load(anchor)
        found = validate(self.task, self.model, self.options.seed)
        say(
            event="result",
            peer=self.options.name,
            system=system,
            val_loss=found.loss if found is not None else None,
            **self.metrics.plain(),
            rounds_partial=rounds_partial,
            bytes_sent=sent,
            anchor_hash=tensor_hash([anchor]),
            momentum_hash=tensor_hash([momentum]),
        )

    def load(self, flat: Tensor) -> None:
        """Writes the fragment's values into the model."""
        for name, value in self.fragment.views(flat).items():
            self.replica.parameters[name].copy_(value)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """One 1-D copy of some tensors, in their order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def say(**event: object) -> None:
    """One event for the launcher."""
    print(json.dumps(event), flush=True)


def await_addresses() -> list[str]:
    """Where to begin: the lighthouse's URL, or the multiaddresses of the peers there are."""
    addresses: list[str] = json.loads(sys.stdin.readline())
    return addresses


def await_start() -> None:
    """Says `ready`, and returns when all are: nobody's start counts as another's stall."""
    say(event="ready")
    sys.stdin.readline()


def await_end() -> None:
    """Returns when all have reported: whoever has ended can serve nobody."""
    sys.stdin.read()
