"""Bytes against loss: each preset at several periods, with learning rates tuned, in one process.

    python -m tests.lab frontier [--steps 600] [--workers 4] [--seeds 1] [--first-seed 0]
        [--lr 0.003 muon=0.01] [--outer-lr FACTOR ...] [--optimizer adamw muon]
        [--curve onebit=28,70 ...]
        [--curve 'sparse=50 diloco.codec=topk32' ...] [--set SECTION.KEY=VALUE ...]
        [--results runs/frontier.jsonl] [--picture PNG] [--finished]

Every run is `algorithms/reference.py` on the built-in task, one core each; real workers end with
the same bits (`make parity`). Each plan gets the best of its optimizer's learning rates, by the
loss on a text's samples of a seed of its own, which is not in the table; `--outer-lr` also tries
the preset's times these factors. A curve may have settings of its own. Finished runs are lines of
the results file, and are not run again: stop it and go on, or ask for more. The code is not part of
what names a run: delete the file when numerics have changed. `--finished` tells what there is so
far. The default takes about ten minutes of two idle cores, on a model of 174 thousand
parameters; `--set task.architecture={}` takes the task's own.

Bytes are those of encoded contributions and reductions that a worker sends, before zstd, beside
data-parallel training in bf16. Some plans end a run with one exact mean of the replicas. It is as
much as two steps of that training, however long the run is. The table has both figures, of the
rounds alone and with that mean; the picture has the first. R is the share of what DDP gains over
one worker alone. Prints Markdown.
"""

import argparse
import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from murmuration.algorithms.fragments import TensorSpec, partition
from murmuration.algorithms.presets import PRESETS
from tests.lab.one_process import Trained, Training, last_mean_bytes, sent, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TUNING_SEED = 100
VALIDATION_BATCHES = 256  # sixteen times a worker's: plans differ by hundredths
LINES = ("local", "ddp")
CURVES = ("diloco=20,100", "streaming=50,100", "onebit=28,70", "sparse=10,25")
COLOURS = {
    "diloco": "#0072B2", "streaming": "#009E73", "onebit": "#D55E00", "sparse": "#CC79A7",
}  # fmt: skip
SMALL = (
    "task.architecture={hidden_size=64,intermediate_size=160,num_hidden_layers=3,"
    "num_attention_heads=2,num_key_value_heads=2}",
    "task.context_bytes=64",
)


@dataclass(frozen=True)
class Point:
    """A plan of the picture: a preset with this period; None is the preset's own.

    Args:
        settings: what else differs from the preset, as `--set` takes it.
    """

    preset: str
    inner_steps: int | None
    settings: tuple[str, ...] = ()

    @property
    def curve(self) -> str:
        """What it has in common with the points of its curve."""
        return ", ".join((self.preset, *self.settings))

    def __str__(self) -> str:
        period = (f"H {self.inner_steps}",) if self.inner_steps else ()
        return ", ".join((f"`{self.preset}`", *period, *self.settings))


@dataclass(frozen=True)
class Rates:
    """What is tuned. Args: outer: a factor on the preset's outer learning rate."""

    lr: float
    outer: float = 1.0


@dataclass(frozen=True)
class Run:
    """One run of the grid."""

    point: Point
    optimizer: str
    rates: Rates
    seed: int
    steps: int
    workers: int
    settings: tuple[str, ...]

    @property
    def training(self) -> Training:
        given = [f'inner.optimizer="{self.optimizer}"', f"inner.lr={self.rates.lr}"]
        if self.point.inner_steps is not None:
            given.append(f"diloco.inner_steps={self.point.inner_steps}")
        training = Training(
            preset=self.point.preset,
            settings=(*given, *self.settings, *self.point.settings),
            steps=self.steps,
            workers=self.workers,
            seed=self.seed,
        )
        if self.rates.outer == 1:
            return training
        outer_lr = training.config.plan.outer_lr * self.rates.outer
        return replace(training, settings=(*training.settings, f"diloco.outer_lr={outer_lr}"))

    @property
    def key(self) -> str:
        """Of everything but the code that decides how it ends, the preset's values included."""
        config = self.training.config
        told = {**asdict(self), "plan": asdict(config.plan), "inner": asdict(config.inner)}
        told["validation_batches"] = VALIDATION_BATCHES
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """Of one run. Args: sent_bytes: by a worker in a step; fewer: than bf16 DDP, times. Both are
    of the rounds alone."""

    loss: float
    sent_bytes: float
    fewer: float
    params: int
    cpu_s: float


def main() -> None:
    """Trains what is not in the results yet; prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--lr",
        type=rate,
        nargs="+",
        default=[(None, 0.003), (None, 0.01)],
        metavar="[OPTIMIZER=]LR",
        help="to choose from, for all optimizers or for one",
    )
    parser.add_argument("--outer-lr", type=float, nargs="+", default=[1.0], metavar="FACTOR")
    parser.add_argument("--optimizer", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--curve", action="append", type=curve, metavar="PRESET=H,H [SETTING ...]")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--results", type=Path, default=Path("runs/frontier.jsonl"))
    parser.add_argument("--picture", type=Path, default=Path("runs/frontier.png"))
    parser.add_argument("--processes", type=int, help="by default as many as there are cores")
    parser.add_argument("--finished", action="store_true", help="tell the results, train nothing")
    options = parser.parse_args()
    for optimizer in options.optimizer:
        if not any(of in (None, optimizer) for of, _ in options.lr):
            parser.error(f"--lr has no learning rate for {optimizer}: add {optimizer}=...")
    points = [Point(name, None) for name in LINES]
    points += itertools.chain(*(options.curve or map(curve, CURVES)))
    grid = Grid(
        options.steps, options.workers, (*SMALL, *options.settings), Results(options.results)
    )
    pairs = list(itertools.product(points, options.optimizer))
    factors = tuple(options.outer_lr)
    with ExitStack() as stack:
        if not options.finished:
            context = multiprocessing.get_context("spawn")
            grid.pool = stack.enter_context(context.Pool(options.processes))
        best = grid.tune(pairs, options.lr, factors)
        found = grid.measure(best, range(options.first_seed, options.first_seed + options.seeds))
    print(table(found, best, grid, options.seeds))
    draw(options.picture, found)


def curve(text: str) -> list[Point]:
    """`PRESET=H,H`, with settings after blanks, as typed."""
    first, *settings = text.split()
    name, _, periods = first.partition("=")
    return [Point(name, int(period), tuple(settings)) for period in periods.split(",")]


def rate(text: str) -> tuple[str | None, float]:
    """`OPTIMIZER=LR` or `LR`, as typed."""
    optimizer, _, lr = text.rpartition("=")
    return optimizer or None, float(lr)


class Results:
    """A file of JSON lines, one for each run that is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[str, Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                told = json.loads(line)
                self._of[told["key"]] = Result(**told["result"])

    def get(self, run: Run) -> Result | None:
        return self._of.get(run.key)

    def add(self, run: Run, result: Result) -> None:
        """Keeps it, for the next time too."""
        self._of[run.key] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"key": run.key, "run": asdict(run), "result": asdict(result)}
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


Found = dict[tuple[Point, str], list[Result]]


@dataclass
class Grid:
    """The runs. Args: settings: of all of them; pool: to train in, None to train nothing."""

    steps: int
    workers: int
    settings: tuple[str, ...]
    results: Results
    pool: "multiprocessing.pool.Pool | None" = None

    def run(self, pair: tuple[Point, str], rates: Rates, seed: int) -> Run:
        return Run(*pair, rates, seed, self.steps, self.workers, self.settings)

    def tune(
        self,
        pairs: Sequence[tuple[Point, str]],
        lrs: Sequence[tuple[str | None, float]],
        factors: Sequence[float],
    ) -> dict[tuple[Point, str], Rates]:
        """The rates with the least loss, by plan and optimizer; nothing is trained for those that
        have no choice."""
        grid = {
            pair: [
                self.run(pair, Rates(lr, factor), TUNING_SEED)
                for optimizer, lr in lrs
                if optimizer in (None, pair[1])
                for factor in (factors if pair[0].inner_steps is not None else (1.0,))
            ]
            for pair in pairs
        }
        given = {pair: runs[0].rates for pair, runs in grid.items() if len(runs) == 1}
        done = self._all([run for pair, runs in grid.items() if pair not in given for run in runs])
        finished = {pair: [run for run in runs if run in done] for pair, runs in grid.items()}
        return {
            pair: given.get(pair) or min(runs, key=lambda run: done[run].loss).rates
            for pair, runs in finished.items()
            if pair in given or runs
        }

    def measure(self, best: dict[tuple[Point, str], Rates], seeds: Sequence[int]) -> Found:
        """The results of every seed, by plan and optimizer."""
        runs = {p: [self.run(p, rates, seed) for seed in seeds] for p, rates in best.items()}
        done = self._all([run for each in runs.values() for run in each])
        found = {p: [done[run] for run in each if run in done] for p, each in runs.items()}
        return {pair: results for pair, results in found.items() if results}

    def _all(self, runs: Sequence[Run]) -> dict[Run, Result]:
        done = {run: result for run in runs if (result := self.results.get(run)) is not None}
        if self.pool is None:
            return done
        for run, result in self.pool.imap_unordered(finish, [r for r in runs if r not in done]):
            self.results.add(run, result)
            done[run] = result
        return done


def finish(run: Run) -> tuple[Run, Result]:
    """Trains one run."""
    began = time.process_time()
    trained = train(run.training)
    per_step = trained.sent.bytes / run.steps
    ddp_step = ddp_bytes(trained) / run.steps
    return run, Result(
        loss=trained.loss_of(trained.anchors(), VALIDATION_BATCHES),
        sent_bytes=per_step,
        fewer=ddp_step / per_step if per_step else 0.0,
        params=sum(fragment.elements for fragment in trained.fragments),
        cpu_s=round(time.process_time() - began, 1),
    )


def ddp_bytes(trained: Trained) -> float:
    """What a worker would send in data-parallel training in bf16."""
    elements = sum(fragment.elements for fragment in trained.fragments)
    whole = partition([TensorSpec("all", (elements,))], 1, "strided")
    plan = replace(PRESETS["ddp"], codec="bf16", reduction_codec="bf16")
    return sent(plan, whole, trained.training.steps, trained.training.workers).bytes


def fewer_with_last_mean(run: Run, result: Result) -> float:
    """How many times fewer bytes than bf16 DDP, an exact mean at the end counted too."""
    rounds = result.sent_bytes * run.steps
    last = last_mean_bytes(run.training.config.plan, result.params, run.workers)
    return result.fewer * rounds / (rounds + last)


def share(loss: float, optimizer: str, found: Found) -> float:
    """R: of what DDP gains over one worker alone; NaN while these are not known."""
    lines = [found.get((Point(name, None), optimizer)) for name in LINES]
    if not all(lines):
        return math.nan
    alone, ddp = (mean_loss(results or ()) for results in lines)
    return (alone - loss) / (alone - ddp)


def mean_loss(results: Sequence[Result]) -> float:
    return statistics.fmean(result.loss for result in results)


def table(found: Found, best: dict[tuple[Point, str], Rates], grid: Grid, seeds: int) -> str:
    """Markdown."""
    params = next(iter(found.values()))[0].params
    cpu_s = sum(result.cpu_s for results in found.values() for result in results)
    lines = [
        f"{grid.workers} workers, {grid.steps} steps, {seeds} seeds at most, {params:,} "
        "parameters; "
        f"{cpu_s:.0f} s of one core without the tuning\n",
        "| plan | optimizer | inner lr | sent per worker and step | than bf16 DDP | "
        "with the last mean | loss | least | greatest | seeds | R |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (point, optimizer), results in found.items():
        losses = [result.loss for result in results]
        rates, loss, first = best[point, optimizer], statistics.fmean(losses), results[0]
        tuned = f"{rates.lr:g}" + (f", outer x {rates.outer:g}" if rates.outer != 1 else "")
        if not first.sent_bytes:
            bytes_ = "- | - | -"
        elif point.preset == "ddp":
            bytes_ = f"{first.sent_bytes / 1e3:.0f} kB in fp32 | - | -"
        else:
            run = grid.run((point, optimizer), rates, TUNING_SEED)
            whole = fewer_with_last_mean(run, first)
            bytes_ = f"{first.sent_bytes / 1e3:.2f} kB | 1/{first.fewer:.0f} | 1/{whole:.0f}"
        lines.append(
            f"| {point} | {optimizer} | {tuned} | {bytes_} | {loss:.3f} | {min(losses):.3f} | "
            f"{max(losses):.3f} | {len(losses)} | {share(loss, optimizer, found):.2f} |"
        )
    return "\n".join(lines)


def draw(path: Path, found: Found) -> None:
    """A panel for each optimizer: bytes against loss, a curve for each preset."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    optimizers = list(dict.fromkeys(optimizer for _, optimizer in found))
    figure = Figure(figsize=(6 * len(optimizers), 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(optimizers), squeeze=False)[0]
    for axes, optimizer in zip(panels, optimizers, strict=True):
        draw_panel(
            axes, {p: results for (p, inside), results in found.items() if inside == optimizer}
        )
        axes.set_title(optimizer, loc="left", fontsize=11)
    panels[0].set_ylabel("validation loss, nats per byte")
    shown = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    lines = {label: line for panel in shown for line, label in panel}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=6, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_panel(axes: "Axes", found: dict[Point, list[Result]]) -> None:
    """One optimizer's."""
    for name, style, words in (
        ("local", (0, (4, 3)), "one worker alone"),
        ("ddp", "solid", "DDP"),
    ):
        if not (results := found.get(Point(name, None))):
            continue
        loss = mean_loss(results)
        axes.axhline(loss, color="#555555", linewidth=1.2, linestyle=style, label=words)
    for name in dict.fromkeys(point.curve for point in found if point.preset not in LINES):
        of_curve = [results for point, results in found.items() if point.curve == name]
        of_curve.sort(key=lambda results: results[0].fewer)
        fewer = [results[0].fewer for results in of_curve]
        means = [mean_loss(results) for results in of_curve]
        colour = COLOURS.get(name)
        axes.plot(fewer, means, "o-", color=colour, markersize=5, linewidth=1.8, label=name)
        for times, results in zip(fewer, of_curve, strict=True):
            ends = [result.loss for result in results]
            axes.plot([times] * 2, [min(ends), max(ends)], color=colour, linewidth=1.0)
    axes.set_xscale("log")
    times = [results[0].fewer for point, results in found.items() if point.preset not in LINES]
    if times:
        ticks = [10**n * first for n in range(5) for first in (1, 3)]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(min(times) / 2, max(times) * 2)
    axes.set_xlabel("times fewer bytes than bf16 DDP, in rounds (without the last mean)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    main()
