"""Iterations of a model in stages on unequal links, beside what the simulator predicts for them.

    python -m tests.lab stage-times [--steps 60] [--only ROUTING ...] [--plot FILE.png]

Eight workers serve 4 stages x 2 replicas on shaped links of 5 to 100 Mbit/s that delay what is sent
by 5 to 100 ms; the swarm places them by these links. The prediction is made from what the workers
have measured of their links and visits, which they leave in links.json: the median over the kinds
of routes that a run with `skip` takes in turns, each searched as long as there, and over 20 draws
of `random`. Draws the training loss over the wall clock of `full` and `skip`. Exits with 1 where an
iteration is more than 20 % off its prediction, or skipping a quarter saves less than 30 %.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from murmuration.algorithms.skippipe.pipeline import Costs, Pipeline
from murmuration.algorithms.skippipe.route import Rules, visited_stages
from murmuration.algorithms.skippipe.routing import origins_in_turns
from murmuration.worker.pipeline.planner import SEARCH_S
from tests.lab.placement import predict
from tests.lab.plan_stages import read_links
from tests.support.swarm_runs import run_swarm
from tests.support.workers import Event

LINKS = (
    "5mbit,delay=100ms", "10mbit,delay=60ms", "20mbit,delay=30ms", "20mbit,delay=40ms",
    "50mbit,delay=10ms", "50mbit,delay=20ms", "100mbit,delay=5ms", "100mbit,delay=5ms",
)  # fmt: skip
STAGES, SKIP, MICROBATCHES = 4, 0.25, 4
ROUTINGS = ("full", "random", "stochastic", "skip")
WARM = 5  # iterations, while links are being measured
OFF, SAVED = 0.2, 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", action="append", choices=ROUTINGS)
    parser.add_argument("--plot", type=Path, help="loss over the wall clock, as a PNG")
    options = parser.parse_args()
    print("| routing | iteration | predicted | off | of full | validation loss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    measured: dict[str, float] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    good = True
    for routing in options.only or ROUTINGS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            report = run_swarm(*flags(routing, options.steps), out=out)
            iteration_s = statistics.median(iterations_s(out)[WARM:])
            predicted_s = predicted(next(iter(sorted(out.glob("*/links.json")))), routing)
            curves[routing] = losses(out)
        measured[routing] = iteration_s
        off = iteration_s / predicted_s - 1
        share = iteration_s / measured["full"] if "full" in measured else None
        good &= abs(off) <= OFF
        good &= routing != "skip" or share is None or share <= 1 - SAVED
        print(
            f"| {routing} | {iteration_s:.2f} s | {predicted_s:.2f} s | {100 * off:+.0f} % | "
            f"{'-' if share is None else format(share, '.2f')} | {report['val_loss']:.3f} |",
            flush=True,
        )
    if options.plot:
        draw(options.plot, curves)
    return 0 if good else 1


def flags(routing: str, steps: int) -> list[str]:
    chosen = ["--stages", str(STAGES), "--replicas", "2", "--routing", routing]
    chosen += ["--skip", str(SKIP)] if routing == "skip" else []
    chosen += ["--steps", str(steps), "--set", f"stages.microbatches={MICROBATCHES}"]
    for index, link in enumerate(LINKS):
        chosen += ["--link", f"w{index}={link}"]
    return chosen


def predicted(links: Path, routing: str) -> float:
    """Seconds of an iteration, by the event simulator."""
    known = read_links(links)
    assert known.stages is not None
    assert known.visits is not None
    assert known.memory is not None
    assert known.activation_bytes is not None
    costs = Costs(
        delay_s=known.links.delay_s(),
        transfer_s=known.links.transfer_s(known.activation_bytes),
        forward_s=known.visits.forward_s,
        backward_s=known.visits.backward_s,
        loss_s=known.visits.loss_s,
    )
    pipeline = Pipeline(stages=known.stages, memory=known.memory, costs=costs)
    visited = visited_stages(STAGES, SKIP if routing == "skip" else 0.0)
    rules = Rules(stages=STAGES, visited=visited)
    origins = origins_in_turns(pipeline, MICROBATCHES)
    draws = {"random": 20, "skip": STAGES - 1}
    return statistics.median(
        predict(
            pipeline, rules, origins, routing, seed, shared_uplinks=True, effort_s=SEARCH_S
        ).iteration_s
        for seed in range(draws.get(routing, 1))
    )


def iterations_s(out: Path) -> list[float]:
    """Of each iteration, from one origin's beginning it to the next."""
    events = max((events_of(path) for path in out.glob("*/events.jsonl")), key=len)
    began = [event["time_s"] for event in events if event["event"] == "iteration"]
    return [later - before for before, later in itertools.pairwise(began)]


def losses(out: Path) -> list[tuple[float, float]]:
    """(seconds since the start, training loss) of one origin's iterations."""
    told = (events_of(path) for path in out.glob("*/events.jsonl"))
    found = max(([event for event in events if event["loss"]] for events in told), key=len)
    return [(event["time_s"] - found[0]["time_s"], event["loss"]) for event in found]


def events_of(path: Path) -> list[Event]:
    """The iterations that one worker has told of; only an origin's have a loss."""
    told: list[Event] = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in told if event["event"] == "iteration"]


def draw(path: Path, curves: dict[str, list[tuple[float, float]]]) -> None:
    """Loss over the wall clock."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for routing, colour in (("full", "#c8553d"), ("skip", "#15466b")):
        if curve := curves.get(routing):
            seconds, loss = zip(*curve, strict=True)
            axes.plot(seconds, loss, color=colour, label=f"{routing}, {len(curve)} iterations")
    axes.set(xlabel="seconds", ylabel="training loss (nats per byte)")
    axes.set_title("4 stages x 2 replicas on 5 to 100 Mbit/s", loc="left", fontsize=11)
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
