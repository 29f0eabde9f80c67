"""Simulated rounds beside NoLoCo's latency model of a pair and of a tree: times, and a picture.

    python -m tests.lab sync-model --plot simulate.png --peers 4,64,1024 --latency-spread 1

Options but `--plot` are those of `murmur simulate`, which it runs. In the model no message has a
size: one takes a lognormal time, whichever peer sends it to which.

Ref: arXiv:2506.10911, the section on latency.
"""

import argparse
import json
import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.link import MessageTime, parse_link
from murmuration.protos.figures import optional, seconds
from murmuration.worker.simulation import Figures, Scenario
from murmuration.worker.views.summary import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"noloco": "#15466b", "diloco": "#c8553d"}
_TREES = 200

Times = NDArray[np.float64]
Runs = Sequence[tuple[Scenario, Figures]]


def pair_s(message: MessageTime) -> float:
    """Expected time of a pair's exchange: twice, each waits for the later of two messages, which
    takes (1 + erf(s/2)) t_c."""
    return 2 * (1 + math.erf(message.s / 2)) * message.mean_s


def tree_s(message: MessageTime, peers: int, runs: int, rng: np.random.Generator) -> Times:
    """Times of `runs` all-reduces over a binary tree whose leaves are the peers.

    On the way up, an inner node goes on when the messages of both its children are there; the way
    down begins at the root when the way up is done, and ends with the last leaf's message. Both
    ways are ceil(log2(peers)) levels; a node without a sibling rises by a message of its own. For
    two peers the expected time is that of a pair.

    Returns:
        Seconds, of shape (runs,).
    """
    return _rise(message, peers, runs, rng) + _rise(message, peers, runs, rng)


def _rise(message: MessageTime, peers: int, runs: int, rng: np.random.Generator) -> Times:
    """The time of one way: the slowest of the paths, the same in distribution up and down."""
    arrived: Times = np.zeros((runs, peers))
    while arrived.shape[1] > 1:
        arrived = arrived + rng.lognormal(message.mu, message.s, arrived.shape)
        if arrived.shape[1] % 2:
            arrived = np.pad(arrived, ((0, 0), (0, 1)))
        arrived = arrived.reshape(runs, -1, 2).max(axis=2)
    return arrived[:, 0]


def predictions(scenario: Scenario) -> tuple[float | None, float | None]:
    """The model's times of a pair and of a tree, in seconds.

    The time that bytes take on an idle link is added. For a pair these are a pseudo-gradient, and
    the part of the anchor that has not gone ahead where there is but one pair, which does not wait
    for it before it computes; for the tree the 2 (n-1)/n pseudo-gradients that no all-reduce can do
    without. None where the model does not apply: with faults, with peers that do not come at the
    same time, in groups that are no pairs, and on a link whose delay is 0 or jitters.
    """
    link = scenario.link
    uneven = scenario.slow_share and scenario.slow_factor > 1
    faults = (scenario.crash_share, scenario.freeze_share, link.loss, scenario.step_spread)
    if any(faults) or uneven or scenario.partition or scenario.group_size > 2:
        return None, None
    if not link.delay_s or link.jitter_s:
        return None, None
    message = MessageTime(link.delay_s, scenario.latency_spread)
    payload_bytes = codec_by_name(scenario.codec).encoded_bytes(scenario.params)
    transfer_s = payload_bytes * 8 / (link.rate_mbps * 1e6)
    anchor_s = scenario.params * 32 / (link.rate_mbps * 1e6)
    meanwhile_s = scenario.inner_steps * scenario.step_s
    late_s = max(0.0, anchor_s - meanwhile_s) if scenario.peers == 2 else 0.0
    trees = tree_s(message, scenario.peers, _TREES, np.random.default_rng(scenario.seed))
    share = 2 * (scenario.peers - 1) / scenario.peers
    return pair_s(message) + late_s + transfer_s, float(trees.mean()) + share * transfer_s


def draw(path: Path, runs: Runs) -> None:
    """Writes a PNG: sync time, idle time and spread against the number of peers. Raises OSError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    sync, idle, spread = figure.subplots(1, 3)
    for preset, of_preset in _by_preset(runs).items():
        found = [each for _, each in of_preset]
        peers, colour = [each.peers for each in found], _COLOURS[preset]
        _line(sync, peers, [each.sync_median_s for each in found], colour, preset)
        _line(sync, peers, [each.sync_p99_s for each in found], colour, f"{preset}, p99", ":")
        _line(idle, peers, [100 * each.idle_share for each in found], colour, preset)
        _line(spread, peers, [each.spread for each in found], colour, preset)
    first = next(iter(_by_preset(runs).values()))
    peers = [each.peers for _, each in first]
    pairs, trees = zip(*(predictions(scenario) for scenario, _ in first), strict=True)
    for name, model in (("model: a pair", pairs), ("model: a tree", trees)):
        _line(sync, peers, model, "#888888", name, "--" if "pair" in name else "-.")
    sync.set(ylabel="time of a sync (s)")
    idle.set(ylabel="share of the time not computing (%)")
    spread.set(ylabel="rms distance of replicas from their mean,\nrelative")
    for axes in (sync, idle, spread):
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


def _by_preset(runs: Runs) -> dict[str, Runs]:
    presets = dict.fromkeys(scenario.preset for scenario, _ in runs)
    return {name: [run for run in runs if run[0].preset == name] for name in presets}


def read(path: Path) -> Runs:
    """What `murmur simulate --json` has written."""
    return [
        (_scenario(each["scenario"]), Figures(**each["figures"]))
        for each in json.loads(path.read_text())
    ]


def _scenario(plain: dict[str, Any]) -> Scenario:
    partition = plain["partition"]
    return Scenario(
        **plain | {"link": parse_link(plain["link"]), "partition": partition and tuple(partition)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", type=Path, help="draw a PNG")
    options, simulated = parser.parse_known_args()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        murmur = [sys.executable, "-m", "murmuration.worker.cli"]
        subprocess.run([*murmur, "simulate", *simulated, "--json", str(path)], check=True)
        runs = read(path)
    rows = []
    for scenario, found in runs:
        times = (found.sync_median_s, found.sync_mean_s, *predictions(scenario))
        cells = (optional(each, seconds) for each in times)
        rows.append((f"{scenario.preset}, {found.peers:,} peers", *cells))
    print(text_table(("run", "sync", "mean", "pair model", "tree model"), rows))
    if options.plot is not None:
        draw(options.plot, runs)


if __name__ == "__main__":
    main()
