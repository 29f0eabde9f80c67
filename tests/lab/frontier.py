"""Bytes against loss: every line tuned by itself, on several seeds, with intervals.

    python -m tests.lab frontier [--steps 600] [--workers 4] [--seeds 5]
        [--lr 0.004 0.008 0.016 0.032] [--outer LR,MOMENTUM ...] [--set SECTION.KEY=VALUE ...]
        [--line 'NAME: PRESET[/MEAN][@WORKERS,...] SECTION.KEY=VALUE ...' ...] [--against NAME ...]
        [--results runs/frontier.jsonl] [--picture PNG] [--check STEPS]

A line is one worker alone, DDP or a plan. Each gets its own outer step, of those given, and its own
inner learning rate, of four or more: a best one at an edge is tried against the next. Both are
chosen on a seed and a text that the table does not use: the sources of torch.nn, while the table is
of Python's own. Then the line trains on each seed.

Differences are between runs with the same seed, intervals of 95 % by Student's t over the seeds: a
difference that its interval does not carry is "none". R is the share of what DDP gains over one
worker alone. Bytes are before zstd, beside data-parallel training in bf16; an exact mean that ends
a run has a column of its own.

Runs are `tests.support.specification` with the gradients of all workers in one pass, by Muon;
`--set 'inner.optimizer="adamw"'` takes the product's default. `MEAN` is one of `one_process.MEANS`.
A finished run is a line of the results file, and is not run again while its settings and code are
the same. `--check` compares every line with one pass for each worker, and exits with 1 where they
differ by more than rounding.

`PRESET@8` has eight workers, `PRESET@8,4,8` four in the second third of the run. Such a line takes
the rates of the swarm that it begins with.
"""

import argparse
import hashlib
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

import murmuration
from murmuration.algorithms.codecs import has_few_bits
from murmuration.algorithms.fragments import TensorSpec, partition
from murmuration.algorithms.plan import PRESETS
from tests.lab.one_process import MEANS, Trained, Training, last_mean_bytes, sent_bytes, train
from tests.support import specification

TUNING_SEED = 100
TUNING_TEXT = str(Path(torch.__file__).parent / "nn")
COMPILED_STEPS = 200  # from which on it pays, and a C++ compiler is needed
VALIDATION_BATCHES = 256  # sixteen times a worker's: plans differ by hundredths
OUTER_STEPS = ((0.9, 0.6), (0.5, 0.6), (1.2, 0.3))  # learning rates and momenta
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom
# Of a model that reads 64 bytes of context, trained with Muon.
MODEL = (
    "task.architecture={hidden_size=64,intermediate_size=160,"
    "num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=2}",
    "task.context_bytes=64",
    'inner.optimizer="muon"',
)
LINES = (
    "alone: local",
    "four bits, kept, H 100, tau 0: onebit diloco.inner_steps=100 diloco.overlap_steps=0 "
    'diloco.codec="e3m0" diloco.reduction_codec="e3m0"',
    "onebit, tau 0: onebit diloco.overlap_steps=0",
    "DDP: ddp",
    "fp32, H 28: diloco diloco.inner_steps=28",
    "onebit: onebit",
    "streaming, H 100: streaming diloco.inner_steps=100",
    "fp32, H 28, radial: diloco/radial diloco.inner_steps=28",
)
_ROOT = Path(murmuration.algorithms.__path__[0]).parent
CODE = (  # that decides how a run ends
    *(_ROOT / "algorithms" / f"{name}.py" for name in ("diloco", "schedule")),
    *(_ROOT / "algorithms" / "fragments.py", *sorted((_ROOT / "algorithms/codecs").glob("*.py"))),
    *(Path(__file__).with_name("one_process.py"), Path(specification.__file__)),
    *(_ROOT / "worker/tasks/llama.py", _ROOT / "worker/tasks/text.py"),
    _ROOT / "worker/training/optimizers.py",
)


@dataclass(frozen=True)
class Line:
    """A line of the table. Args: mean: one of `MEANS`; settings: as `--set` takes them; swarm: how
    many workers there are in each part of the run, where that is not the table's."""

    name: str
    preset: str
    mean: str
    settings: tuple[str, ...]
    swarm: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Line":
        name, separator, plan = text.partition(":")
        plan, *settings = plan.split() or [""]
        plan, _, counts = plan.partition("@")
        preset, _, mean = plan.partition("/")
        swarm = tuple(int(count) for count in counts.split(",") if counts)
        if not separator or preset not in PRESETS or (mean and mean not in MEANS):
            raise argparse.ArgumentTypeError(f"no NAME: PRESET[/MEAN][@WORKERS,...] ...: {text}")
        line = cls(name, preset, mean or "plain", tuple(settings), swarm)
        if len(swarm) > 1 and not line.has_outer_step:
            raise argparse.ArgumentTypeError(f"it has no rounds to come and go between: {text}")
        return line

    @property
    def has_outer_step(self) -> bool:
        plan = PRESETS[self.preset]
        return plan.exchange == "mean" and plan.payload == "pseudo_gradient"


@dataclass(frozen=True)
class Rates:
    """The tuned rates. Args: outer: learning rate and momentum; None where there is none."""

    lr: float
    outer: tuple[float, float] | None

    @property
    def settings(self) -> tuple[str, ...]:
        inner = (f"inner.lr={self.lr}",)
        if self.outer is None:
            return inner
        lr, momentum = self.outer
        return (*inner, f"diloco.outer_lr={lr}", f"diloco.outer_momentum={momentum}")


@dataclass(frozen=True)
class Result:
    """The result of one run. Args: sent_bytes: by a worker in a step; fewer: than bf16 DDP, times.
    Both are of the rounds alone."""

    loss: float
    sent_bytes: float
    fewer: float
    params: int
    cpu_s: float


class Results:
    """A file of JSON lines, one for each run that is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            told = json.loads(line)
            self._of[told["key"]] = Result(**told["result"])

    def get(self, training: Training) -> Result | None:
        return self._of.get(key_of(training))

    def add(self, training: Training, result: Result) -> None:
        """Keeps it, for the next time too."""
        self._of[key_of(training)] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"key": key_of(training), "run": asdict(training), "result": asdict(result)}
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def key_of(training: Training) -> str:
    """A hash of the settings, the preset's values too, and the code that decides a run's end."""
    config = training.config
    told = {**asdict(training), "plan": asdict(config.plan), "inner": asdict(config.inner)}
    told |= {"validation_batches": VALIDATION_BATCHES, "code": code_hash()}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@cache
def code_hash() -> str:
    """A hash of the sources that decide a run's end, and of the versions of Python and torch."""
    versions = f"{sys.version} {torch.__version__}".encode()
    return hashlib.sha256(b"\0".join((versions, *(p.read_bytes() for p in CODE)))).hexdigest()


@dataclass
class Campaign:
    """The runs. Args: settings: of all of them."""

    steps: int
    workers: int
    settings: tuple[str, ...]
    results: Results
    lrs: tuple[float, ...]
    outer_steps: tuple[tuple[float, float], ...] = OUTER_STEPS

    def training(self, line: Line, rates: Rates, seed: int, *tuning: str) -> Training:
        return Training(
            preset=line.preset,
            settings=(*self.settings, *tuning, *line.settings, *rates.settings),
            steps=self.steps,
            workers=max(line.swarm, default=self.workers),
            swarm=line.swarm if len(line.swarm) > 1 else (),
            seed=seed,
            mean=line.mean,
            batched="yes",
        )

    def run(self, training: Training) -> Result:
        """Trains it, unless it is finished."""
        result = self.results.get(training)
        if result is None:
            began, compiled = time.process_time(), self.steps >= COMPILED_STEPS
            trained = train(replace(training, batched="compiled" if compiled else "yes"))
            result = result_of(trained, began)
            self.results.add(training, result)
        return result

    def tune(self, line: Line) -> Rates:
        """The outer step with the least loss at the second inner rate, then the inner rate."""
        line = replace(line, swarm=line.swarm[:1])

        def loss(rates: Rates) -> float:
            text = f"task.text={json.dumps(TUNING_TEXT)}"
            found = self.run(self.training(line, rates, TUNING_SEED, text)).loss
            return found if math.isfinite(found) else math.inf

        outer_steps = self.outer_steps if line.has_outer_step else (None,)
        outer = min((Rates(self.lrs[1], each) for each in outer_steps), key=loss).outer
        tried = [Rates(lr, outer) for lr in sorted(self.lrs)]
        while True:
            best = min(tried, key=loss)
            if best is tried[0]:
                tried.insert(0, Rates(best.lr / 2, outer))
            elif best is tried[-1]:
                tried.append(Rates(best.lr * 2, outer))
            else:
                return best


def result_of(trained: Trained, began: float) -> Result:
    sent = trained.sent_bytes
    return Result(
        loss=trained.loss_of(trained.anchors(), VALIDATION_BATCHES),
        sent_bytes=sent / trained.training.steps,
        fewer=ddp_bytes(trained) / sent if sent else 0.0,
        params=sum(fragment.elements for fragment in trained.fragments),
        cpu_s=round(time.process_time() - began, 1),
    )


def ddp_bytes(trained: Trained) -> float:
    """The bytes that a worker would send in data-parallel training in bf16."""
    elements = sum(fragment.elements for fragment in trained.fragments)
    whole = partition([TensorSpec("all", (elements,))], 1, "strided")
    plan = replace(PRESETS["ddp"], codec="bf16", reduction_codec="bf16")
    return sent_bytes(plan, whole, trained.training.steps, trained.training.workers)


def main() -> int:
    """Trains what is not in the results yet; prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.004, 0.008, 0.016, 0.032])
    parser.add_argument(
        "--outer",
        type=lambda text: tuple(map(float, text.split(","))),
        nargs="+",
        default=OUTER_STEPS,
        metavar="LR,MOMENTUM",
    )
    parser.add_argument("--line", dest="lines", type=Line.of, action="append")
    parser.add_argument("--against", nargs="+", default=["fp32, H 28", "onebit"], metavar="NAME")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--results", type=Path, default=Path("runs/frontier.jsonl"))
    parser.add_argument("--picture", type=Path, default=Path("runs/frontier.png"))
    parser.add_argument("--check", type=int, metavar="STEPS", help="train nothing else")
    options = parser.parse_args()
    lines = options.lines or [Line.of(text) for text in LINES]
    campaign = Campaign(
        steps=options.check or options.steps,
        workers=options.workers,
        settings=(*MODEL, *options.settings),
        results=Results(options.results),
        lrs=tuple(options.lr),
        outer_steps=tuple(options.outer),
    )
    if options.check:
        return check(lines, campaign)
    best, losses = measure(lines, campaign, options.seeds)
    print(table(best, losses, campaign, options.against), flush=True)
    draw(options.picture, losses)
    return 0


Losses = dict[Line, list[Result]]


def measure(lines: list[Line], campaign: Campaign, seeds: int) -> tuple[dict[Line, Rates], Losses]:
    """The rates and the results of seeds 0, 1, ... of each line."""
    best = {line: campaign.tune(line) for line in lines}
    return best, {
        line: [campaign.run(campaign.training(line, rates, seed)) for seed in range(seeds)]
        for line, rates in best.items()
    }


def check(lines: Iterable[Line], campaign: Campaign) -> int:
    """Compares one pass for all workers with one for each.

    A sign that is nearly 0 may come out the other way, which the steps that follow enlarge: there
    the anchors are further apart."""
    failed = 0
    for line in lines:
        outer = campaign.outer_steps[0] if line.has_outer_step else None
        training = campaign.training(line, Rates(campaign.lrs[1], outer), 0)
        if line.has_outer_step:  # three rounds, whatever its period is
            period = f"diloco.inner_steps={campaign.steps // 3}"
            training = replace(training, settings=(*training.settings, period))
        batched, single = train(training), train(replace(training, batched="no"))
        losses = [each.loss_of(each.anchors()) for each in (batched, single)]
        one, other = (torch.cat(each.anchors()) for each in (batched, single))
        named = {name: each.detach() for name, each in single.task.model().named_parameters()}
        first = [fragment.flatten(named) for fragment in single.fragments]
        apart = float((one - other).norm() / (other - torch.cat(first)).norm())
        few = has_few_bits(single.plan.codec) or single.plan.codec == "e3m0"
        limit, most = (0.1, 0.02) if few else (1e-3, 1e-4)
        ok = apart < limit and abs(losses[0] - losses[1]) < most
        failed += not ok
        print(
            f"{line.name}: {apart:.1e} of the way apart, losses {losses[0]:.5f} and "
            f"{losses[1]:.5f}: {'as it should be' if ok else 'NOT THE SAME'}",
            flush=True,
        )
    return int(failed > 0)


# ---------------------------------------------------------------------------------- what it says


@dataclass(frozen=True)
class Interval:
    """A mean with its interval of 95 %, infinite of one value."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        if len(values) < 2:
            return cls(statistics.fmean(values), math.inf)
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), T_95[len(values) - 2] * error)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"

    @property
    def difference(self) -> str:
        """As a difference: none unless the interval leaves 0 out."""
        if abs(self.mean) <= self.half:
            return f"none (± {self.half:.3f})"
        return f"{self.mean:+.3f} ± {self.half:.3f}"


def of_name(losses: Losses, name: str) -> list[float]:
    return [r.loss for line, results in losses.items() if line.name == name for r in results]


def paired(losses: Losses, line: Line, name: str) -> str:
    """The loss of a line above that of another, seed by seed."""
    pairs = zip((r.loss for r in losses[line]), of_name(losses, name), strict=False)
    apart = [one - other for one, other in pairs]
    return "-" if line.name == name or not apart else Interval.of(apart).difference


def share(losses: Losses, line: Line) -> Interval | None:
    """R, seed by seed; None while DDP or one worker alone is not known."""
    alone, ddp = of_name(losses, "alone"), of_name(losses, "DDP")
    found = [(a - r.loss) / (a - d) for a, d, r in zip(alone, ddp, losses[line], strict=False)]
    return Interval.of(found) if found else None


def table(best: dict[Line, Rates], losses: Losses, campaign: Campaign, against: list[str]) -> str:
    """Markdown."""
    cpu_s = sum(result.cpu_s for results in losses.values() for result in results)
    params = next(iter(losses.values()))[0].params
    rows = [
        f"{campaign.workers} workers, {campaign.steps} steps, {params:,} parameters; "
        f"{cpu_s:.0f} s of one core without the tuning\n",
        f"| line | inner lr | outer lr, momentum | of bf16 DDP | with the last mean | loss | "
        f"least, greatest | seeds | {' | '.join(f'beside {name}' for name in against)} | R |",
        "| --- " + "| ---: " * (8 + len(against)) + "|",
    ]
    for line, results in losses.items():
        rates, values, first = best[line], [result.loss for result in results], results[0]
        outer = "{:g}, {:g}".format(*rates.outer) if rates.outer else "-"
        bytes_ = "- | -"
        if line.has_outer_step:
            bytes_ = f"1/{first.fewer:.0f} | 1/{fewer_with_last_mean(line, first, campaign):.0f}"
        beside = " | ".join(paired(losses, line, name) for name in against)
        rows.append(
            f"| {line.name} | {rates.lr:g} | {outer} | {bytes_} | {statistics.fmean(values):.3f} | "
            f"{min(values):.3f}, {max(values):.3f} | {len(values)} | "
            f"{beside} | {share(losses, line) or '-'} |"
        )
    return "\n".join(rows)


def fewer_with_last_mean(line: Line, result: Result, campaign: Campaign) -> float:
    """How many times fewer bytes than bf16 DDP, an exact mean at the end counted too."""
    rounds = result.sent_bytes * campaign.steps
    plan = campaign.training(line, Rates(campaign.lrs[0], None), 0).config.plan
    last = last_mean_bytes(plan, result.params, campaign.workers)
    return result.fewer * rounds / (rounds + last)


def draw(path: Path, losses: Losses) -> None:
    """R with intervals over bytes, of the lines that exchange in rounds."""
    found = {
        line.name: (results[0].fewer, each)
        for line, results in losses.items()
        if line.has_outer_step and (each := share(losses, line))
    }
    if not found:
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (name, (fewer, each)) in enumerate(found.items()):
        at = fewer * 1.03 ** (place % 5 - 2)  # side by side
        half = each.half if math.isfinite(each.half) else 0
        marker = "os^Dv<>ph*X"[place % 11]
        axes.errorbar([at], [each.mean], yerr=[half], marker=marker, capsize=3, label=name)
    axes.axhline(1, color="#555555", linewidth=1.2, label="DDP")
    axes.axhline(0, color="#555555", linewidth=1.2, linestyle=(0, (4, 3)), label="alone")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    axes.set_xlabel("times fewer bytes than bf16 DDP, in rounds (without the last mean)")
    axes.set_ylabel("R: share of DDP's gain, with its interval of 95 %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
