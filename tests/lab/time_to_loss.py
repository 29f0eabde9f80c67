"""Wall-clock seconds to a loss on links of several speeds, in the manner of AlgoPerf.

    python -m tests.lab time-to-loss [--link 2mbit ...] [--system ddp ...] [--steps 1200]
        [--most-steps 3600] [--pace-steps 100] [--set SECTION.KEY=VALUE ...]
        [--results runs/time-to-loss.jsonl] [--picture PNG]

The target is the validation loss that `ddp` reaches in `--steps` inner steps. Two things are
measured of each system, and multiplied:

    steps to the target   by a run of real workers on loopback, evaluated on the way, as long as
                          `--most-steps`. The learning rate stays constant after its warm-up, so
                          that no run's length decides how it is doing on the way.
    seconds a step        by a shorter run behind links of that speed, each worker in a network
                          namespace (root), by `make bench`: the mean over a run of `--pace-steps`.

So no cell of the table is a run of its own, and each has a `~`.

Bits do not depend on the link as long as no round fails, so the first needs no link. torchft's
DiLoCo ends with the losses of `diloco` (docs/evidence/bench.md), so it takes as many steps. Starts
and evaluations are not in the seconds. All workers share this machine's cores, `local` too: one
worker alone is one of as many that run at the same time.

Finished runs are lines of the results file and are not run again, so it can be stopped, and asked
for one link or one system at a time. Neither the code nor a preset's values are part of what names
a run: delete the file when numerics or presets have changed. A system that fails costs the others
nothing: why stands below the table, the exit code is 1, and the next call tries it again. The
default takes over an hour of two idle cores. Prints Markdown.
"""

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from murmuration.algorithms.link import parse_link
from murmuration.coordinator.processes import Interrupts
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.figures import seconds
from tests.lab.compare.options import LINKS, LOCAL, Bench
from tests.lab.compare.session import Session
from tests.lab.compare.tables import Row
from tests.support.swarm_runs import run_swarm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET = "ddp"
SYSTEMS = ("ddp", "diloco", "streaming", "noloco", "sparse", "onebit", "torchft", LOCAL)
_LOSSES_OF = {"torchft": "diloco"}
_EVALUATIONS = 48  # of the run that sets the target
_LIMIT_S = 60.0
_COLOURS = dict(
    zip(
        SYSTEMS,
        ("#333333", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#999999"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Options:
    """What was asked for. Args: settings: of all runs; most_steps: of a run that is evaluated."""

    links: tuple[str, ...]
    systems: tuple[str, ...]
    steps: int
    most_steps: int
    pace_steps: int
    workers: int
    seed: int
    settings: tuple[str, ...]

    def shared(self) -> str:
        """What all results depend on."""
        told = (self.workers, self.seed, *self.settings)
        return "/".join(map(str, told))

    def curve_key(self, name: str) -> str:
        steps = self.steps if name == TARGET else self.most_steps
        return f"curve/{name}/{steps}/{self.steps}/{self.shared()}"

    def pace_key(self, name: str, link: str) -> str:
        return f"pace/{name}/{parse_link(link)}/{self.pace_steps}/{self.shared()}"


class Results:
    """A file of JSON lines: by key, the curve of a run as [step, loss], or seconds a step.

    `problems` are of this process, by key: why there is neither.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.curves: dict[str, list[tuple[int, float]]] = {}
        self.paces: dict[str, float] = {}
        self.problems: dict[str, str] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                told = json.loads(line)
                if "curve" in told:
                    self.curves[told["key"]] = [(step, loss) for step, loss in told["curve"]]
                else:
                    self.paces[told["key"]] = told["pace_s"]

    def add_curve(self, key: str, curve: list[tuple[int, float]]) -> None:
        self.curves[key] = curve
        self._write({"key": key, "curve": curve})

    def add_pace(self, key: str, pace_s: float) -> None:
        self.paces[key] = pace_s
        self._write({"key": key, "pace_s": pace_s})

    def _write(self, line: Mapping[str, object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def main() -> int:
    """Runs what is not in the results yet; prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", dest="links", action="append", metavar="LINK")
    parser.add_argument("--system", dest="systems", action="append", choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--most-steps", type=int, default=3600)
    parser.add_argument("--pace-steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--results", type=Path, default=Path("runs/time-to-loss.jsonl"))
    parser.add_argument("--picture", type=Path, default=Path("runs/time_to_loss.png"))
    given = vars(parser.parse_args())
    results, picture = Results(given.pop("results")), given.pop("picture")
    options = Options(
        links=tuple(given.pop("links") or LINKS),
        systems=tuple(given.pop("systems") or SYSTEMS),
        settings=tuple(given.pop("settings")),
        **given,
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    learn(options, results)
    for link in options.links:
        time_link(options, link, results)
    answers = [Answer.of(name, options, results) for name in options.systems]
    print(table(answers, options, target_of(options, results)))
    draw(picture, answers, options)
    return ExitCode.FAILED if results.problems else ExitCode.DONE


def learn(options: Options, results: Results) -> None:
    """The curves that are not known yet. Raises SystemExit: there is no target."""
    names = (TARGET, *(_LOSSES_OF.get(name, name) for name in options.systems))
    for name in dict.fromkeys(names):
        key = options.curve_key(name)
        if key in results.curves:
            continue
        steps = options.steps if name == TARGET else options.most_steps
        settings = (
            'inner.schedule="constant"',
            f"run.evaluate_every={max(1, options.steps // _EVALUATIONS)}",
            *options.settings,
        )
        try:
            report = run_swarm(
                *("--preset", name, "--steps", str(steps), "--seed", str(options.seed)),
                *("--workers", "1" if name == LOCAL else str(options.workers)),
                *(word for setting in settings for word in ("--set", setting)),
            )
        except SystemExit as error:
            if name == TARGET:
                raise
            results.problems[key] = str(error)
            continue
        curve = [(int(step), float(loss)) for step, loss in report["val_loss_curve"]]
        results.add_curve(key, [*curve, (steps, float(report["val_loss"]))])


def time_link(options: Options, link: str, results: Results) -> None:
    """The paces on one link that are not known yet, of systems whose steps are."""
    missing = [
        name
        for name in options.systems
        if options.pace_key(name, link) not in results.paces
        and options.curve_key(_LOSSES_OF.get(name, name)) in results.curves
    ]
    if not missing:
        return

    def keep(row: Row) -> None:
        key = options.pace_key(row.name, link)
        if key in results.paces:
            return
        if row.wall_s is not None:
            results.add_pace(key, row.wall_s / row.asked_steps)
        elif row.name in missing:
            results.problems[key] = row.problem or "no figures"

    with tempfile.TemporaryDirectory() as folder, Interrupts() as interrupts:
        bench = Bench(
            links=(link,),
            presets=tuple(name for name in missing if name not in _LOSSES_OF),
            systems=tuple(name for name in missing if name in _LOSSES_OF),
            workers=options.workers,
            steps=options.pace_steps,
            seed=options.seed,
            settings=options.settings,
            limit_s=_LIMIT_S,
            out=Path(folder) / "bench",
        )
        bench.check()
        say = partial(click.echo, nl=False, err=True)
        code = Session(bench, interrupts, say, keep).run()
    if code > 128:
        raise SystemExit(code)


def target_of(options: Options, results: Results) -> float:
    """The loss to reach."""
    return results.curves[options.curve_key(TARGET)][-1][1]


@dataclass(frozen=True)
class Answer:
    """Of one system.

    Args:
        steps: to the target, None where it was not reached.
        best: the least loss of its run, None where there was none.
        paces_s: seconds a step by link, where there is a figure.
        problems: why there is none, or no run.
    """

    name: str
    steps: int | None
    best: float | None
    paces_s: Mapping[str, float]
    problems: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, options: Options, results: Results) -> "Answer":
        curve_key = options.curve_key(_LOSSES_OF.get(name, name))
        curve = results.curves.get(curve_key, [])
        target = target_of(options, results)
        keys = {link: options.pace_key(name, link) for link in options.links}
        where = {"its losses": curve_key, **keys}
        told = {place: results.problems.get(key) for place, key in where.items()}
        return cls(
            name=name,
            steps=next((step for step, loss in curve if loss <= target), None),
            best=min((loss for _, loss in curve), default=None),
            paces_s={link: results.paces[k] for link, k in keys.items() if k in results.paces},
            problems=[f"{place}: {problem}" for place, problem in told.items() if problem],
        )

    def seconds_on(self, link: str) -> float | None:
        """To the target."""
        pace_s = self.paces_s.get(link)
        return None if pace_s is None or self.steps is None else self.steps * pace_s


def table(answers: Sequence[Answer], options: Options, target: float) -> str:
    """Markdown."""
    links = [str(parse_link(link)) for link in options.links]
    lines = [
        f"target {target:.3f}, which `{TARGET}` reaches in {options.steps:,} steps; "
        f"{options.workers} workers, seed {options.seed}; ~: steps x seconds a step, no run\n",
        f"| system | least loss | steps to the target | {' | '.join(links)} |",
        f"| --- | ---: | ---: | {' | '.join(['---:'] * len(links))} |",
    ]
    for answer in answers:
        steps = f"{answer.steps:,}" if answer.steps else f"not in {options.most_steps:,}"
        best = f"{answer.best:.3f}" if answer.best is not None else "failed"
        steps = steps if answer.best is not None else "-"
        cells = [_cell(answer.seconds_on(link), answer.paces_s.get(link)) for link in options.links]
        lines.append(f"| `{answer.name}` | {best} | {steps} | {' | '.join(cells)} |")
    problems = [f"- `{answer.name}`, {each}" for answer in answers for each in answer.problems]
    return "\n".join([*lines, *(["", *problems] if problems else [])])


def _cell(to_target_s: float | None, pace_s: float | None) -> str:
    if pace_s is None:
        return "-"
    step = f"{seconds(pace_s)} a step"
    return step if to_target_s is None else f"~{seconds(to_target_s)} ({step})"


def draw(path: Path, answers: Sequence[Answer], options: Options) -> None:
    """Speed of the links against seconds to the target, a line for each system that reaches it."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_lines(axes, answers, options)
    figure.legend(loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_lines(axes: "Axes", answers: Sequence[Answer], options: Options) -> None:
    never = [each.name for each in answers if each.steps is None and each.best is not None]
    for answer in answers:
        points = [
            (parse_link(link).rate_mbps, to_target_s)
            for link in options.links
            if (to_target_s := answer.seconds_on(link)) is not None
        ]
        if points:
            mbps, took_s = zip(*sorted(points), strict=True)
            dashed = "--" if answer.name in _LOSSES_OF else "-"
            axes.plot(mbps, took_s, "o" + dashed, color=_COLOURS[answer.name], label=answer.name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    speeds = sorted({parse_link(link).rate_mbps for link in options.links})
    axes.set_xticks(speeds, [f"{mbps:,g}" for mbps in speeds])
    axes.minorticks_off()
    axes.set_xlabel("each worker's link, Mbit/s")
    axes.set_ylabel("seconds to the target: steps x pace")
    if never:
        words = f"not in {options.most_steps:,} steps: {', '.join(never)}"
        axes.set_title(words, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    raise SystemExit(main())
