"""The files that a run leaves: the report as JSON and as text, and its picture."""

import io
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console

from murmuration.coordinator.printer import print_report
from murmuration.coordinator.records import COUNTS, Record
from murmuration.coordinator.report import Report, build_report
from murmuration.protos.events import Curve, float_of, int_of, text_of
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.protos.figures import count
from murmuration.protos.files import RESULTS, read_json, write_atomically
from murmuration.worker.views.summary import Document, map_of, maps_of

_REPORT = "report.json"
_MAX_POINTS = 2000
_TEXT_WIDTH = 160


def leave_results(
    records: Sequence[Record],
    out: Path,
    console: Console | None,
    *,
    settings: Mapping[str, object],
    elapsed_s: float,
    json_path: Path | None = None,
    picture: bool = True,
) -> Report:
    """Leaves report, text and picture in OUT, and prints the report. Failed writes are warnings."""
    report = build_report(records, settings=settings, elapsed_s=elapsed_s)
    problems = []
    curves = {record.peer: record.loss_curve() for record in records}
    if picture and any(curves.values()):
        try:
            draw_loss_curve(out / "loss.png", curves, report)
            report["loss_png"] = str(out / "loss.png")
        except OSError as error:
            problems.append(f"the loss curve could not be written: {error}")
    report["out"] = str(out / _REPORT)
    as_json = json.dumps(report, indent=1, allow_nan=False) + "\n"

    def write(path: Path, content: str) -> None:
        try:
            write_atomically(path, content.encode())
        except OSError as error:
            problems.append(f"{path} could not be written: {error}")

    for path in filter(None, (out / _REPORT, json_path)):  # before what may fail to print
        write(path, as_json)
    text = io.StringIO()
    print_report(report, Console(file=text, width=_TEXT_WIDTH))
    write(out / "report.txt", text.getvalue())
    if console is not None:
        print_report(report, console)
        for problem in problems:
            console.print(f"warning: {problem}", markup=False, soft_wrap=True)
    return report


def report_of_folder(folder: Path, console: Console | None, *, picture: bool = True) -> Report:
    """The report of the run that a worker, a swarm or a coordinator has left there; printed if
    there is a console. A worker's is made again, and written. Raises MurmurError: there is none."""
    if (folder / RESULTS).exists():
        document = _read(folder / RESULTS)
        if records := list(records_of(document).values()):
            wall_s = [float_of(record.result or {}, "wall_s") or 0.0 for record in records]
            settings = {"reporter": document.get("reporter")}
            return leave_results(
                records, folder, console, settings=settings, elapsed_s=max(wall_s), picture=picture
            )
    elif (folder / _REPORT).exists():
        report = _read(folder / _REPORT)
        try:
            print_report(report, console or Console(file=io.StringIO()))
        except (LookupError, TypeError, ValueError) as error:
            why = f"{folder / _REPORT} is no report of this version: {error!r}"
            raise MurmurError(why, ExitCode.CHECKPOINT) from error
        return report
    raise MurmurError(
        f"{folder} holds neither {RESULTS} nor {_REPORT}: name the folder of a worker or a swarm "
        "that has ended; `murmur status` shows a run under way",
        ExitCode.CHECKPOINT,  # as all commands that take RUN
    )


def records_of(document: Document) -> dict[str, Record]:
    """The record that a worker has of each peer: its result, or else the last known."""
    known = maps_of(document, "peers")
    staged = any("stage" in map_of(each, "result") for each in known)
    records, uncounted = {}, dict[str, Any](dict.fromkeys(COUNTS))
    for each in known:
        record = Record(
            text_of(each, "peer") or "?",
            address=text_of(each, "address") or "",
            state=text_of(each, "state") or "?",
            step=int_of(each, "step") or 0,
            stage=int_of(each, "stage") if staged else None,
            **uncounted,
        )
        records[record.peer] = record
        if isinstance(result := each.get("result"), Mapping):
            record.apply({**result, "event": "result"}, 0.0)
    return records


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise MurmurError(f"{path} cannot be read: {error}", ExitCode.CHECKPOINT) from error
    if not isinstance(document, dict):
        raise MurmurError(f"{path} is no report: it holds no object", ExitCode.CHECKPOINT)
    return document


def draw_loss_curve(path: Path, curves: Mapping[str, Curve], report: Report) -> None:
    """Writes a PNG of training losses (nats) by worker, and of the anchor's. Raises OSError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mean, val_curve = report["train_loss_curve"], report["val_loss_curve"]
    val_loss, unit = report["val_loss"], report["loss_unit"]
    title = f"{report['preset'] or 'run'}, {count(report['workers'], 'worker')}"
    if report["inner_steps"]:
        title += f", a round every {count(report['inner_steps'], 'inner step')}"
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def draw(curve: Curve, color: str, width: float, label: str | None, **style: Any) -> None:
        stride = -(-len(curve) // _MAX_POINTS)
        steps, losses = zip(*curve[:-1:stride], curve[-1], strict=True)
        axes.plot(steps, losses, color=color, linewidth=width, label=label, **style)

    for n, curve in enumerate(filter(None, curves.values())):  # one legend entry for all
        draw(curve, "#7aa6c2", 0.7, None if n else "each worker", alpha=0.6)
    draw(_smoothed(mean), "#15466b", 2.2, "mean of the workers")
    if val_curve:
        draw(val_curve, "#c8553d", 1.0, "validation loss on the way", marker="o", markersize=3)
    if val_loss is not None:
        axes.axhline(val_loss, color="#c8553d", linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8)
        label = f"validation loss of the anchor: {val_loss:.3f}"
        axes.plot(mean[-1][:1], [val_loss], "o", color="#c8553d", markersize=6, label=label)
    axes.set(xlabel="inner step", ylabel=f"training loss ({unit})" if unit else "training loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")  # losses fall; "best" warns where it is slow
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())


def _smoothed(curve: Curve) -> Curve:
    """A running mean over a fiftieth of the curve, and less towards both ends."""
    reach = len(curve) // 100
    sums = list(accumulate((loss for _, loss in curve), initial=0.0))
    result: Curve = []
    for i, (step, _) in enumerate(curve):
        half = min(reach, i, len(curve) - 1 - i)
        result.append((step, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return result
