"""Loss and use of the link over time, from the events that each worker has left."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rendezvous.records import ENDING
from protos.events import Event, float_of, int_of

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
