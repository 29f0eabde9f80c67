"""A staged model's iteration with full lanes and with searched routes: who computes what, when.

    python -m tests.lab schedule [--picture docs/evidence/schedule.png]

Draws what `plan-stages` predicts for the links of docs/evidence/skippipe.md.
"""

import argparse
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.protos.figures import percent
from tests.lab.placement import RoutingPrediction
from tests.lab.plan_stages import Options, StagesAnswer, case_of
from tests.lab.timeline import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINKS = (
    "5mbit,delay=100ms", "10mbit,delay=60ms", "20mbit,delay=30ms", "20mbit,delay=40ms",
    "50mbit,delay=10ms", "50mbit,delay=20ms", "100mbit,delay=5ms", "100mbit,delay=5ms",
)  # fmt: skip
_COLOURS = {Kind.FORWARD: "#15466b", Kind.BACKWARD: "#c8553d", Kind.LOSS: "#e0a526"}
_IDLE = "#eeeeee"
_ROUTINGS = ("full", "skip")
_ROW_INCHES, _EDGE_INCHES, _MOST_INCHES = 0.24, 1.0, 40.0
_NUMBERED_SHARE = 0.011  # of the width that a visit must have for its microbatch to be named


def main() -> int:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", type=Path, default=Path("docs/evidence/schedule.png"))
    options = parser.parse_args()
    asked = Options(links=LINKS, stages=4, microbatches=6, forward_ms=100.0, activation_bytes=98304)
    case = case_of(asked)
    draw(options.picture, case.known.names, StagesAnswer.of(case, case.proposed()))
    return 0


def draw(path: Path, names: Sequence[str], answer: StagesAnswer) -> None:
    """Writes a PNG. Raises OSError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [answer.draws[routing][0] for routing in _ROUTINGS]
    height = len(rows) * (_EDGE_INCHES + _ROW_INCHES * answer.pipeline.peers)
    figure = Figure(figsize=(12, min(height, _MOST_INCHES)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(rows), 1, sharex=True)
    longest_s = max(row.iteration_s for row in rows)
    for axes, row in zip(all_axes, rows, strict=True):
        _panel(axes, answer.pipeline, names, row, longest_s)
    all_axes[-1].set(xlabel="time (s)", xlim=(0, longest_s))
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=4, loc="outside upper right")
    figure.savefig(path, format="png")


def _panel(
    axes: "Axes",
    pipeline: Pipeline,
    names: Sequence[str],
    first: RoutingPrediction,
    longest_s: float,
) -> None:
    """One routing: a row for each peer, stage 0 on top."""
    order = [peer for replicas in pipeline.stages for peer in replicas]
    everyone = range(len(order))
    axes.barh(everyone, first.iteration_s, height=0.8, color=_IDLE, label="idle")
    for kind, colour in _COLOURS.items():
        bars = [
            (place, span.start_s, span.end_s - span.start_s)
            for place, peer in enumerate(order)
            for span in first.timeline.spans[peer]
            if span.kind is kind
        ]
        places, starts_s, lasts_s = zip(*bars, strict=True)
        axes.barh(
            places,
            lasts_s,
            left=starts_s,
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.4,
            label=kind.value,
        )
    for place, peer in enumerate(order):
        for span in first.timeline.spans[peer]:
            if span.end_s - span.start_s > _NUMBERED_SHARE * longest_s:
                middle_s = (span.start_s + span.end_s) / 2
                axes.text(
                    *(middle_s, place, str(span.microbatch)),
                    color="white",
                    fontsize=6,
                    ha="center",
                    va="center_baseline",
                )
    below = 0
    for replicas in pipeline.stages[:-1]:
        below += len(replicas)
        axes.axhline(below - 0.5, color="#888888", linewidth=0.6)
    axes.set_yticks(everyone, [f"stage {pipeline.stage_of[p]}  {names[p]}" for p in order])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"{first.routing}: {first.iteration_s:.3g} s, peers compute "
        f"{percent(statistics.fmean(first.utilization), 0)} of the time",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    raise SystemExit(main())
