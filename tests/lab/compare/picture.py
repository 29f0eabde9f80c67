"""Loss and use of the link over time, as a picture: what each way of exchanging does to a link."""

import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from murmuration.algorithms.link import Link
from murmuration.coordinator.records import ENDING
from murmuration.protos.events import Event, float_of, int_of
from murmuration.protos.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Floats = NDArray[np.float64]

BIN_S = 0.25  # workers report twice as seldom, and whenever a pause begins or ends
_MOST_BINS = 1600


@dataclass(frozen=True)
class Series:
    """Means over the workers of one run, from its first step on.

    Args:
        time_s: middles of bins of equal width.
        loss: training loss, nats.
        sent_mbps: what a worker sends.
    """

    time_s: Floats
    loss: Floats
    sent_mbps: Floats


def read_events(path: Path) -> list[Event]:
    """Those of one worker's `events.jsonl`, in order; none where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events: list[Event] = []
    for line in lines:
        try:
            event: Any = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def series_of(workers: Sequence[Sequence[Event]]) -> Series | None:
    """Puts the events of one run's workers together; None when none of them trained.

    Each worker's clock starts with its first step. Between two reports bytes count as sent evenly,
    and since a worker reports when a pause begins and when it ends, pauses stay sharp.

    Args:
        workers: the events of each.
    """
    tracks = [track for events in workers if (track := _track(events)) is not None]
    if not tracks:
        return None
    end_s = min(float(times[-1]) for times, _, _ in tracks)
    bins = max(1, min(_MOST_BINS, round(end_s / BIN_S)))
    edges = np.linspace(0.0, end_s, bins + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    width_s = end_s / bins
    sent = np.mean([np.interp(edges, times, total) for times, total, _ in tracks], axis=0)
    losses = np.mean([np.interp(middles, times, loss) for times, _, loss in tracks], axis=0)
    return Series(middles, losses, np.diff(sent) * 8 / 1e6 / width_s)


def smoothed(values: Floats, reach: int) -> Floats:
    """Running means over up to `reach` values on either side, fewer towards the ends."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(len(values))
    half = np.minimum(reach, np.minimum(index, len(values) - 1 - index))
    means: Floats = (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)
    return means


def _track(events: Sequence[Event]) -> tuple[Floats, Floats, Floats] | None:
    """(seconds since training began, bytes sent so far, loss), a point per report."""
    points = []
    for event in events:
        time_s, sent = float_of(event, "time_s"), int_of(event, "bytes_sent")
        loss = float_of(event, "loss")
        told = event.get("event") == "progress" and event.get("state") not in ENDING
        trained = told and bool(int_of(event, "step"))
        if trained and time_s is not None and sent is not None and loss is not None:
            points.append((time_s, float(sent), loss))
    began_s = next((float_of(event, "time_s") for event in events if _began(event)), None)
    if not points:
        return None
    times, sent_bytes, losses = np.array(points).T
    times = times - (times[0] if began_s is None else began_s)
    return (times, sent_bytes, losses) if times[-1] > 0 else None


def _began(event: Event) -> bool:
    return event.get("event") == "started"


DRAWN = ("ddp", "diloco", "streaming")
# Okabe and Ito's, told apart by all kinds of colour vision.
_COLOURS = {"ddp": "#D55E00", "diloco": "#0072B2", "streaming": "#009E73"}
_NAMES = {"ddp": "ddp", "diloco": "DiLoCo", "streaming": "Streaming DiLoCo"}
_IDEAS = {
    "ddp": "ddp: sends in every step",
    "diloco": "DiLoCo: sends in bursts, and pauses for them",
    "streaming": "Streaming DiLoCo: sends evenly, while training goes on",
}
_BEYOND = 1.15  # of diloco's end: ddp takes many times as long
_SMOOTHING = 60  # a running mean over a thirtieth of what is shown


def draw_link_use(
    path: Path, runs: Mapping[str, Series], link: Link, whole_s: Mapping[str, float | None]
) -> None:
    """Writes a PNG of two panels over wall time: training loss, and what a worker sends.

    Args:
        runs: by preset; those of `DRAWN` are drawn, as far as there.
        whole_s: the wall time of the whole run, measured or extrapolated, as far as known.

    Raises:
        OSError: the file cannot be written.
        ValueError: there is none to draw.
    """
    drawn = {name: runs[name] for name in DRAWN if name in runs}
    if not drawn:
        raise ValueError(f"none of {', '.join(DRAWN)} is there to draw")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    heights = (3, *[1] * len(drawn))
    above, *strips = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    end_s = _end_s(drawn)
    most_mbps = max(link.rate_mbps, *(float(s.sent_mbps.max()) for s in drawn.values()))
    for (name, series), strip in zip(drawn.items(), strips, strict=True):
        _draw_loss(above, name, series, end_s, whole_s.get(name))
        _draw_use(strip, name, series, link)
        strip.set(ylim=(0, 1.45 * most_mbps), yticks=(0, link.rate_mbps))
    above.set(ylabel="training loss\n(nats per byte)", xlim=(0, end_s))
    above.margins(y=0.12)
    strips[len(strips) // 2].set(ylabel="sent by a worker\n(Mbit/s)")
    strips[-1].set(xlabel="wall time (s)")
    for axes in (above, *strips):
        axes.spines[["top", "right"]].set_visible(False)
    above.grid(axis="y", color="#dddddd", linewidth=0.6)
    above.set_axisbelow(True)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())


def _end_s(runs: Mapping[str, Series]) -> float:
    """Where the time axis ends: soon after diloco does, if it is there."""
    ends = {name: float(series.time_s[-1]) for name, series in runs.items()}
    return _BEYOND * ends.get("diloco", max(ends.values()))


def _draw_loss(
    axes: "Axes", name: str, series: Series, end_s: float, whole_s: float | None
) -> None:
    """The curve, and its name where it ends or leaves the picture."""
    colour = _COLOURS[name]
    losses = smoothed(series.loss, _reach(series, end_s))
    axes.plot(series.time_s, losses, color=colour, linewidth=2.0)
    seen = int((series.time_s <= end_s).sum()) - 1
    at = (float(series.time_s[seen]), float(losses[seen]))
    words, above = _NAMES[name], name != "streaming"  # the lowest of the curves
    if seen < len(series.time_s) - 1:
        words += f": {whole_s:,.0f} s in all" if whole_s else ": goes on"
    else:
        axes.plot(*at, "o", color=colour, markersize=5)
    axes.annotate(
        words,
        at,
        (0, 9 if above else -9),
        textcoords="offset points",
        ha="right",
        va="bottom" if above else "top",
        color=colour,
        fontweight="bold",
        fontsize=9,
    )


def _draw_use(axes: "Axes", name: str, series: Series, link: Link) -> None:
    """What a worker sends as an area, so that bursts and pauses show, below what the link takes."""
    colour, seconds, mbps = _COLOURS[name], series.time_s, series.sent_mbps
    axes.fill_between(seconds, mbps, step="mid", color=colour, alpha=0.3, linewidth=0)
    axes.step(seconds, mbps, where="mid", color=colour, linewidth=1.2)
    axes.axhline(link.rate_mbps, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.text(
        *(0.01, 0.96, _IDEAS[name]),
        transform=axes.transAxes,
        va="top",
        color=colour,
        fontweight="bold",
        fontsize=9,
    )
    axes.text(
        *(0.995, 0.96, f"the link: {link.rate_mbps:g} Mbit/s"),
        transform=axes.transAxes,
        ha="right",
        va="top",
        color="#555555",
        fontsize=9,
    )


def _reach(series: Series, end_s: float) -> int:
    """Bins on either side of a running mean."""
    bins = end_s / (series.time_s[1] - series.time_s[0]) if len(series.time_s) > 1 else 0
    return round(bins / _SMOOTHING)
