"""One peer is slow, stands still now and then, or has a slow link: what that costs the others.

    python -m tests.lab unequal [--peers 4 8 32] [--preset diloco] [--case half] [--loss]

Live nodes and trainers on the virtual clock, with inner steps by speed. A step takes a tenth of a
second, a tenth more or less. The others' speed is that of the same swarm without this peer. With
--loss they train a small model on bytes. The loss is that of the anchor at the end, beside an even
swarm that takes as many inner steps in all. The last columns say how many steps the peer has taken,
the share of them that is in the model when the others end, and how often a round of its closed
without it.
Exits with 1 where the others are below 0.99 in the second half of the run, when it is known who
is slow, or where the loss is more than 0.5 % higher.
"""

import argparse
import asyncio
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from murmuration.algorithms.fragments import TensorSpec
from murmuration.algorithms.plan import PRESETS
from murmuration.worker.config import Config, TaskConfig
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Batch, Cursor, Task, load_task
from murmuration.worker.training.evaluation import validate
from murmuration.worker.training.metrics import Metrics
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.swarm import Held, Peer, Swarm
from tests.protocol.train_side import TrainSide
from tests.protocol.virtual_time import run

UNSUITED = ("ddp", "local", "kseed")  # every step waits, or nothing does
CASES = ("half", "flapping", "2 Mbit/s")
TARGET, MOST_LOSS = 0.99, 0.005
STEP_S, SPREAD = 0.1, 0.1
STILL_S, AWAKE_S = 5.0, 15.0
TASK = {
    "architecture": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    "context_bytes": 64,
    "batch_size": 4,
}
LAYERS = (12_000,) * 6
COLUMNS = (
    "speed of the others",
    "second half",
    "loss",
    "its steps",
    "in the model",
    "without it",
    "failed",
)
ODD = "odd"


@dataclass(frozen=True)
class SmallModel(Problem):
    """The built-in task instead of points to be pulled to."""

    @property
    def config(self) -> Config:
        config = super().config
        return replace(config, task=replace(config.task, options=TASK))

    @property
    def schema(self) -> tuple[TensorSpec, ...]:
        return tuple(part_of(task(self.seed), self.config).schema)


@lru_cache
def task(seed: int) -> Task:
    return load_task(TaskConfig().name, seed=seed, options=TASK)


class TimedSwarm(Swarm):
    """Inner steps take a little more or less than the problem says."""

    def part(self, problem: Problem, name: str, train: TrainSide) -> Held:
        drawn, mean_s = random.Random(f"{problem.seed} {name}"), problem.step_s.get(name, STEP_S)

        def computes(_: float = mean_s) -> None:
            train.computes(mean_s * drawn.uniform(1 - SPREAD, 1 + SPREAD))

        if not isinstance(problem, SmallModel):
            return Held(Synthetic(problem, name, computes), problem.fragments)
        cursor = Cursor(seed=problem.seed, stream=name)
        part = part_of(task(problem.seed), problem.config)
        replica = part.replica(task(problem.seed), problem.config, cursor, train)
        replica.batches = slowly(replica.batches, computes)
        return Held(replica, problem.fragments)


def slowly(batches: Iterator[Batch], computes: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        computes()
        yield batch


@dataclass(frozen=True)
class Outcome:
    """Args: speed: inner steps a second of each of the others; later: in the second half of the
    run; steps: of all; odd: its figures."""

    speed: float
    later: float
    loss: float
    steps: int
    failed: int
    odd: tuple[object, ...]


def main() -> int:
    """Prints Markdown; 1 where a row is over a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss", action="store_true", help="trains a model: ten times as long")
    suited = [name for name in PRESETS if name not in UNSUITED]
    parser.add_argument("--preset", dest="presets", choices=suited, action="append")
    parser.add_argument("--case", dest="cases", choices=CASES, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"| preset | peers | one is | {' | '.join(COLUMNS)} |\n| --- | ---: | --- |" + 7 * " ---: |"
    )
    good = True
    for preset, peers in itertools.product(options.presets or suited, options.peers):
        plan = replace(PRESETS[preset], dylu=True, weighting="work")
        kind = SmallModel if options.loss else Problem
        problem = kind(plan=plan, steps=options.steps, seed=options.seed, layers=LAYERS)
        names = [f"p{number:03}" for number in range(peers - 1)]
        without = run(outcome(problem, names))
        for case in options.cases or CASES:
            found = run(outcome(problem, [*names, ODD], case))
            speed, later = found.speed / without.speed, found.later / without.later
            worse = 0.0
            if options.loss:
                even = replace(problem, steps=round(found.steps / peers))
                worse = found.loss / run(outcome(even, [*names, ODD])).loss - 1
            good &= later >= TARGET and worse <= MOST_LOSS
            loss = f"{found.loss:.4f}, {100 * worse:+.2f} %" if options.loss else "-"
            cells = (f"{speed:.3f}", f"{later:.3f}", loss, *found.odd, found.failed)
            print(f"| `{preset}` | {peers} | {case} | {' | '.join(map(str, cells))} |", flush=True)
    print(f"\nsecond half {TARGET}, loss {MOST_LOSS:+.1%}: {'kept' if good else 'MISSED'}")
    return 0 if good else 1


async def outcome(problem: Problem, names: Sequence[str], case: str = "") -> Outcome:
    """Of one run of these peers, to its end."""
    if case == "half":
        problem = replace(problem, step_s={ODD: 2 * STEP_S})
    async with TimedSwarm(problem) as swarm:
        if case == "2 Mbit/s":
            swarm.links_mbps[ODD] = 2.0
        await swarm.start(*names)
        peers = [swarm[name] for name in names]
        others = [peer for peer in peers if not (case and peer.name == ODD)]
        await swarm.until(lambda: all(metrics(p).inner_steps for p in peers), 300)
        flaps = asyncio.create_task(stand_still(swarm)) if case == "flapping" else None
        limit_s = 10 * problem.steps
        half = problem.steps // 2
        await swarm.until(lambda: all(p.trainer.step >= half for p in others), limit_s)
        taken, half_at = sum(metrics(p).inner_steps for p in others), swarm.loop.time()
        await swarm.until(lambda: all(p.trainer.step >= problem.steps for p in others), limit_s)
        later = sum(metrics(p).inner_steps for p in others) - taken
        later_s = swarm.loop.time() - half_at
        odd = odd_figures(swarm[ODD]) if case else ()
        if flaps is not None:
            flaps.cancel()
            swarm.thaw(ODD)
        await swarm.finished(limit_s)
        return Outcome(
            speed=sum(metrics(p).inner_steps / metrics(p).wall_s for p in others) / len(others),
            later=later / later_s / len(others),
            loss=loss_of(problem, others[0]) if isinstance(problem, SmallModel) else math.nan,
            steps=sum(metrics(p).inner_steps for p in peers),
            failed=sum(metrics(p).rounds_failed for p in peers),
            odd=odd,
        )


def odd_figures(peer: Peer) -> tuple[int, str, int]:
    """Its steps by now, the share that is in rounds which have closed, and how many had not it."""
    steps = metrics(peer).inner_steps
    fragments = peer.trainer.fragments
    left = max(f.work_steps + (f.in_flight.work_steps if f.in_flight else 0) for f in fragments)
    missed = sum(bool(event["missed"]) for event in peer.of_kind("round"))
    return steps, f"{100 * (1 - left / steps):.0f} %", missed


def metrics(peer: Peer) -> Metrics:
    return peer.trainer.metrics


async def stand_still(swarm: Swarm) -> None:
    while True:
        await swarm.sleep(AWAKE_S)
        swarm.freeze(ODD)
        await swarm.sleep(STILL_S)
        swarm.thaw(ODD)


def loss_of(problem: SmallModel, peer: Peer) -> float:
    """Held out, of what the peer's anchors are."""
    for each in peer.trainer.fragments:
        each.write(each.state.anchor)
    found = validate(task(problem.seed), peer.replica.model, problem.seed, count=32)
    assert found is not None, "there is no limit of time"
    return found.loss


if __name__ == "__main__":
    raise SystemExit(main())
