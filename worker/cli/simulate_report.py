"""What `murmur simulate` found, for people: tables, and a picture of three panels."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from worker.simulation import Figures, Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Sequence[tuple[Scenario, Figures]]

_PLAIN_WIDTH = 160
_COLOURS = {"noloco": "#15466b", "diloco": "#c8553d"}


def print_runs(runs: Runs) -> None:
    """A table for each preset, and below it why rounds were given up."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    for preset, of_preset in _by_preset(runs).items():
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(preset)
        for name in (
            *("sync", "p99", "mean", "pair model", "tree model", "idle"),
            *("spread", "to optimum", "failed", "sent/round"),
        ):
            table.add_column(name, justify="right", no_wrap=True)
        for _, found in of_preset:
            table.add_row(
                f"{found.peers:,} peers",
                _time(found.sync_median_s),
                _time(found.sync_p99_s),
                _time(found.sync_mean_s),
                _time(found.pair_model_s),
                _time(found.tree_model_s),
                f"{100 * found.idle_share:.1f} %",
                f"{found.spread:.2g}",
                f"{found.distance:.2g}",
                f"{100 * found.rounds_failed / max(1, found.rounds):.3g} %",
                _bytes(found.bytes_per_round),
            )
        console.print(table)
        for _, found in of_preset:
            for line in _troubles(found):
                console.print(f"  {found.peers:,} peers: {line}", soft_wrap=True)


def _troubles(found: Figures) -> list[str]:
    lines = [f"{count:,} failed, {reason}" for reason, count in found.reasons.items()]
    if found.half_applied:
        lines.append(f"{found.half_applied:,} rounds were applied by a part of their group only")
    if found.unfinished:
        lines.append(f"{found.unfinished:,} peers did not come to the end")
    return lines


def draw(path: Path, runs: Runs) -> None:
    """Writes a PNG: sync time, idle time and spread against the number of peers. Raises OSError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    sync, idle, unreachable = figure.subplots(1, 3)
    for preset, of_preset in _by_preset(runs).items():
        found = [each for _, each in of_preset]
        peers, colour = [each.peers for each in found], _COLOURS[preset]
        _line(sync, peers, [each.sync_median_s for each in found], colour, preset)
        _line(sync, peers, [each.sync_p99_s for each in found], colour, f"{preset}, p99", ":")
        _line(idle, peers, [100 * each.idle_share for each in found], colour, preset)
        _line(unreachable, peers, [each.spread for each in found], colour, preset)
    first = next(iter(_by_preset(runs).values()))
    peers = [each.peers for _, each in first]
    for name, model in (
        ("model: a pair", [each.pair_model_s for _, each in first]),
        ("model: a tree", [each.tree_model_s for _, each in first]),
    ):
        _line(sync, peers, model, "#888888", name, "--" if "pair" in name else "-.")
    sync.set(ylabel="time of a sync (s)")
    idle.set(ylabel="share of the time not computing (%)")
    unreachable.set(ylabel="rms distance of replicas from their mean,\nrelative")
    for axes in (sync, idle, unreachable):
        axes.set(xlabel="peers")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    sync.legend(frameon=False)
    figure.savefig(path, format="png")


def _line(
    axes: "Axes",
    peers: list[int],
    values: Sequence[float | None],
    colour: str,
    label: str,
    style: str = "-",
) -> None:
    points = [(n, value) for n, value in zip(peers, values, strict=True) if value is not None]
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linestyle=style, marker="o", markersize=3, label=label)


def _by_preset(runs: Runs) -> dict[str, list[tuple[Scenario, Figures]]]:
    found: dict[str, list[tuple[Scenario, Figures]]] = {}
    for scenario, figures in runs:
        found.setdefault(scenario.preset, []).append((scenario, figures))
    return found


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:.0f} B"
