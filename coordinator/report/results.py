"""What a run leaves behind: the report, its picture, and the report for people."""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.rendezvous.records import Record
from coordinator.report.report import Report, build_report, write_report
from protos.events import Curve
from protos.figures import count
from protos.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console


def leave_results(
    records: Sequence[Record],
    out: Path,
    console: "Console | None",
    *,
    settings: Mapping[str, object],
    elapsed_s: float,
    json_path: Path | None = None,
    picture: bool = True,
) -> Report:
    """Writes OUT/report.json, OUT/report.txt and OUT/loss.png, and prints the report. Never raises
    OSError.

    What cannot be written is a warning. The report is printed all the same, if there is a console.
    """
    from rich.console import Console

    from coordinator.report.printer import print_report

    report = build_report(records, settings=settings, elapsed_s=elapsed_s)
    problems = []
    try:
        if picture:
            report["loss_png"] = _draw(report, records, out / "loss.png")
    except OSError as error:
        problems.append(f"the loss curve could not be written: {error}")
    report["out"] = str(out / "report.json")
    for path in filter(None, (out / "report.json", json_path)):
        try:
            write_report(report, path)
        except OSError as error:
            problems.append(f"{path} could not be written: {error}")
    text = io.StringIO()
    print_report(report, Console(file=text, width=_TEXT_WIDTH))
    try:
        write_atomically(out / "report.txt", text.getvalue().encode())
    except OSError as error:
        problems.append(f"{out / 'report.txt'} could not be written: {error}")
    if console is None:
        return report
    print_report(report, console)
    for problem in problems:
        console.print(f"warning: {problem}", markup=False, soft_wrap=True)
    return report


def _draw(report: Report, records: Sequence[Record], path: Path) -> str | None:
    curves = {record.peer: record.loss_curve() for record in records}
    if not any(curves.values()):
        return None

    title = f"{report['preset'] or 'run'}, {count(report['workers'], 'worker')}"
    if report["inner_steps"]:
        title += f", a round every {count(report['inner_steps'], 'inner step')}"
    draw_loss_curve(
        path,
        curves,
        report["train_loss_curve"],
        report["val_loss"],
        title,
        report["loss_unit"],
        report["val_loss_curve"],
    )
    return str(path)


_MAX_POINTS = 2000
_TEXT_WIDTH = 160


def draw_loss_curve(
    path: Path,
    curves: Mapping[str, Curve],
    mean: Curve,
    val_loss: float | None,
    title: str,
    unit: str | None = None,
    val_curve: Curve | None = None,
) -> None:
    """Writes a PNG: each worker thin, their mean thick, the anchor's validation loss at the end
    and, where it was measured, on the way.

    Args:
        curves: training loss per inner step (nats), by worker.
        mean: over the workers.
        val_loss: of the anchor, in `unit`; None leaves it out.
        val_curve: the same on the way.

    Raises:
        OSError: the file cannot be written.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    thin = True  # one legend entry for all workers
    for curve in curves.values():
        if curve:
            steps, losses = zip(*thinned(curve), strict=True)
            label = "each worker" if thin else None
            axes.plot(steps, losses, color="#7aa6c2", linewidth=0.7, alpha=0.6, label=label)
            thin = False
    if mean:
        steps, losses = zip(*thinned(smoothed(mean)), strict=True)
        axes.plot(steps, losses, color="#15466b", linewidth=2.2, label="mean of the workers")
    if val_curve:
        steps, losses = zip(*thinned(val_curve), strict=True)
        label = "validation loss on the way"
        axes.plot(steps, losses, "o-", color="#c8553d", linewidth=1.0, markersize=3, label=label)
    if val_loss is not None:
        last = mean[-1][0] if mean else 0
        axes.axhline(val_loss, color="#c8553d", linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8)
        label = f"validation loss of the anchor: {val_loss:.3f}"
        axes.plot([last], [val_loss], "o", color="#c8553d", markersize=6, label=label)
    axes.set(xlabel="inner step", ylabel=f"training loss ({unit})" if unit else "training loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if mean or val_curve or val_loss is not None:
        axes.legend(frameon=False, loc="upper right")  # losses fall; "best" warns where it is slow
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())


def thinned(curve: Curve) -> Curve:
    """At most about 2,000 of the points, the last among them."""
    stride = -(-len(curve) // _MAX_POINTS)
    return [*curve[:-1:stride], curve[-1]] if stride > 1 else list(curve)


def smoothed(curve: Curve) -> Curve:
    """A running mean over a fiftieth of the curve, so that the eye sees the trend.

    The window shrinks towards both ends, so that the curve begins and ends at its own values.
    """
    reach = len(curve) // 100
    sums = [0.0]
    for _, loss in curve:
        sums.append(sums[-1] + loss)
    result: Curve = []
    for i, (step, _) in enumerate(curve):
        half = min(reach, i, len(curve) - 1 - i)
        result.append((step, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return result
