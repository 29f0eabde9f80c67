"""What a run leaves behind: the report, its picture, and the report for people."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.rendezvous.records import Record
from coordinator.report.report import Report, build_report, write_report
from protos.figures import count

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
) -> Report:
    """Writes OUT/report.json and OUT/loss.png, and prints the report. Never raises OSError.

    What cannot be written is said; the printed report comes all the same, unless `console` is None.
    """
    report = build_report(records, settings=settings, elapsed_s=elapsed_s)
    problems = []
    try:
        report["loss_png"] = _draw(report, records, out / "loss.png")
    except OSError as error:
        problems.append(f"the loss curve could not be written: {error}")
    report["out"] = str(out / "report.json")
    for path in filter(None, (out / "report.json", json_path)):
        try:
            write_report(report, path)
        except OSError as error:
            problems.append(f"{path} could not be written: {error}")
    if console is None:
        return report
    from coordinator.report.printed import print_report

    print_report(report, console)
    for problem in problems:
        console.print(f"warning: {problem}", markup=False, soft_wrap=True)
    return report


def _draw(report: Report, records: Sequence[Record], path: Path) -> str | None:
    curves = {record.peer: record.loss_curve() for record in records}
    if not any(curves.values()):
        return None
    from coordinator.report.curve import draw_loss_curve

    title = f"{report['preset'] or 'run'}, {count(report['workers'], 'worker')}"
    if report["inner_steps"]:
        title += f", a round every {count(report['inner_steps'], 'inner step')}"
    draw_loss_curve(path, curves, report["train_loss_curve"], report["val_loss"], title)
    return str(path)
