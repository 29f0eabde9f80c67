"""What skipping stages in training costs, and what it saves when stages are missing afterwards.

    python -m tests.lab skippipe-omission [--steps 1000] [--processes 1] [--seed 0] [--only NAME]
                                          [--own-draw]

A byte-level Llama of 6 stages x 1 layer learns the Python standard library's text: 10 microbatches
of 4 samples per step, each by a route of its own, Adam on each stage's gradient sum over its
visits. First values are drawn as Llama's are, with a standard deviation of 0.02, or by the built-in
task's own rule. Then perplexity on held-out text, of the full model and without 2 or 3 of the
stages 1 to 5: of the mean loss over all choices of them, with the best and the worst choice in
brackets. Those include gaps of three stages in a row, which no route of four in six has: the last
column is without them. Unequal routes visit three or five stages, four on average.

Writes a Markdown table; fails if what makes skipping worth while does not hold: a skip-trained
model does without half of its stages, and a full-trained one does not; equal coverage stands
omission better than unequal; routes of unequal length do better than equal ones; more skipping
costs the full model more.

Ref: arXiv:2502.19913.
"""

import argparse
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from statistics import fmean

import torch

from murmuration.algorithms.skippipe.route import Rules, even_stage_sets
from murmuration.worker.pipeline.stage_replica import StageGradients
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.tasks import Batch, Cursor, Staged, StageModule, load_task
from murmuration.worker.training.evaluation import build_stages, route_loss

STAGES, MICROBATCHES = 6, 10
OMITTED = ((0, 0), (2, 2), (3, 3), (3, 2))  # how many, and at most so many in a row
LEARNING_RATE = 1e-3
LLAMA_RANGE = 0.02
VALIDATION_BATCHES = 25

Stages = tuple[int, ...]
ALL: Stages = tuple(range(STAGES))
# Stage 1 by every microbatch, stage 4 by three of ten, and the same ones in every step.
UNBALANCED = [(0, 1, 2, 3)] * 4 + [(0, 1, 2, 5)] * 3 + [(0, 1, 4, 5)] * 3


def full(step: int) -> Sequence[Stages]:
    """Every microbatch visits all stages."""
    return [ALL] * MICROBATCHES


def skipping(
    visited: int, full_every: int = 0, spread: int = 0
) -> Callable[[int], Sequence[Stages]]:
    """Equal coverage, drawn anew in every step; every so many steps all stages instead."""
    rules = Rules(stages=STAGES, visited=visited, spread=spread)

    def stages(step: int) -> Sequence[Stages]:
        if full_every and step % full_every == 0:
            return full(step)
        return even_stage_sets(MICROBATCHES, rules, seed=step)

    return stages


VARIANTS: dict[str, Callable[[int], Sequence[Stages]]] = {
    "full": full,
    "skip 33 %": skipping(4),
    "skip 33 %, full every 10th": skipping(4, full_every=10),
    "skip 33 %, unequal routes": skipping(4, spread=1),
    "skip 33 %, unbalanced fixed routes": lambda step: UNBALANCED,
    "skip 50 %": skipping(3),
}


@dataclass(frozen=True)
class Asked:
    """One variant to train."""

    name: str
    steps: int
    seed: int
    initializer_range: float | None = LLAMA_RANGE


@dataclass(frozen=True)
class Perplexity:
    """Of the mean loss, and of the best and worst choice of stages."""

    mean: float
    best: float
    worst: float

    def __str__(self) -> str:
        if self.best == self.worst:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ({self.best:.2f} to {self.worst:.2f})"


def main() -> int:
    """Prints a row for each variant; 1 if an ordering does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1, help="variants at a time, a core each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=VARIANTS, help="one of the variants")
    parser.add_argument(
        "--own-draw", action="store_true", help="of first values, by the task's rule"
    )
    options = parser.parse_args()
    names = options.only or list(VARIANTS)
    drawn = None if options.own_draw else LLAMA_RANGE
    asked = [Asked(name, options.steps, options.seed, drawn) for name in names]
    print(f"validation perplexity after {options.steps} steps\n")
    print(
        "| trained | full model | omit 2 of 6 | omit 3 of 6 | omit 3, no three in a row |\n"
        "| --- | --- | --- | --- | --- |"
    )
    found: dict[str, list[Perplexity]] = {}
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for name, perplexities in zip(names, pool.imap(train, asked), strict=True):
            found[name] = perplexities
            print(f"| {name} | {' | '.join(map(str, perplexities))} |", flush=True)
    wrong = [] if options.only else list(refuted(found))
    for claim in wrong:
        print(f"does not hold: {claim}")
    return 1 if wrong else 0


def refuted(found: dict[str, list[Perplexity]]) -> list[str]:
    """The claims that the perplexities contradict."""
    means = {name: [each.mean for each in perplexities] for name, perplexities in found.items()}
    all_, skip, tenth, unequal, fixed, half = (means[name] for name in VARIANTS)
    claims = {
        "without half of its stages a full-trained model is more than 50 % worse": (
            all_[2] > 1.5 * all_[0]
        ),
        "without half of its stages a skip-trained model is less than 10 % worse": (
            max(each[2] / each[0] for each in (skip, tenth, unequal, half)) < 1.1
        ),
        "the full model is best when trained full, worst when half was skipped": (
            all_[0] < skip[0] < half[0]
        ),
        "a full route every 10th step improves the full model": tenth[0] < skip[0],
        "routes of 3 and 5 stages improve the full model, and what is left of it without half of "
        "its stages": unequal[0] < skip[0] and unequal[2] < skip[2],
        "unbalanced coverage stands omission worse than equal coverage": fixed[2] > skip[2],
        "full training stands it worst": all_[2] > fixed[2],
    }
    return [claim for claim, holds in claims.items() if not holds]


def train(asked: Asked) -> list[Perplexity]:
    """Perplexities without those of `OMITTED`."""
    torch.set_num_threads(1)
    architecture = {
        "num_hidden_layers": STAGES,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": asked.initializer_range,
    }
    task = load_task("llama-bytes", seed=asked.seed, options={"architecture": architecture})
    assert isinstance(task, Staged)
    stages = build_stages(task, StagesConfig(count=STAGES))
    optimizers = [torch.optim.Adam(stage.parameters(), LEARNING_RATE) for stage in stages]
    sums = [gradient_sums(stage) for stage in stages]
    batches = task.batches("train", Cursor(seed=asked.seed, stream="skippipe"))
    for step in range(asked.steps):
        train_step(stages, sums, optimizers, VARIANTS[asked.name](step), batches)
    cursor = Cursor(seed=asked.seed, stream="validation")
    held_out = list(islice(task.batches("validation", cursor), VALIDATION_BATCHES))
    return [perplexity(stages, held_out, *omitted) for omitted in OMITTED]


def gradient_sums(stage: StageModule) -> StageGradients:
    """Of a stage: every backward adds to them, for they are the gradients of its parameters."""
    parameters = dict(stage.named_parameters())
    total = StageGradients({name: held.shape for name, held in parameters.items()})
    for name, held in parameters.items():
        held.grad = total.sums[name]
    return total


def train_step(
    stages: Sequence[StageModule],
    sums: Sequence[StageGradients],
    optimizers: Sequence[torch.optim.Optimizer],
    routes: Sequence[Stages],
    batches: Iterator[Batch],
) -> None:
    """A microbatch by each route; each stage steps by the mean over its visits, if there was one.

    Args:
        sums: of each stage, bound to its parameters.
    """
    for microbatch, route in enumerate(routes):
        torch.autograd.backward([route_loss(stages, route, next(batches))])
        for stage in route:
            sums[stage].added(microbatch)
    for total, optimizer in zip(sums, optimizers, strict=True):
        if total.visits:
            total.averaged()
            optimizer.step()
        total.clear()


def longest_gap(route: Stages) -> int:
    """Of stages in a row that the route leaves out."""
    return max(after - before - 1 for before, after in pairwise((*route, STAGES)))


@torch.inference_mode()
def perplexity(
    stages: Sequence[StageModule], batches: Sequence[Batch], omitted: int, in_a_row: int
) -> Perplexity:
    """Over all choices of that many stages to leave out, at most so many of them in a row; stage 0
    stays."""
    every = [(0, *others) for others in combinations(ALL[1:], STAGES - 1 - omitted)]
    kept = [route for route in every if longest_gap(route) <= in_a_row]
    losses = [fmean(route_loss(stages, route, each).item() for each in batches) for route in kept]
    return Perplexity(math.exp(fmean(losses)), math.exp(min(losses)), math.exp(max(losses)))


if __name__ == "__main__":
    raise SystemExit(main())
