"""A worker's reports of itself: JSON lines on stdout and in its log, documents on the wire.

Each is a map with `event`, its kind, `peer`, `at`, the time of day, `time_s`, seconds since the
start, and the fields of its kind. Of another version, what does not fit counts as missing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Literal

from murmuration.protos.figures import percent, seconds

EVENTS = "events.jsonl"  # the log, in a worker's folder
NO_END = 1 << 40  # steps of a run that ends when its loops do

EventKind = Literal[
    # parameters, preset, inner_steps (null: without rounds), steps, tokens of a step (null: the
    # task does not count in them), device
    "run",
    "relayed",  # by: names of relays; address: others reach the peer there, for they cannot dial it
    "router_port",  # address: others dial that, from where the router leads them here
    "listening",  # address, pid, origin: how the address was found, if it was not given
    "metrics",  # url
    "page",  # url; token_file, where readers show one
    "started",  # group, step
    # step, steps, loss, rounds: completed by this process, state, bytes_sent, bytes_received,
    # learning_rate, gradient_norm, steps_per_s; where they are known, of this process: samples,
    # samples_per_s, tokens, tokens_per_s; peers: that live, this one among them
    "progress",
    "validation",  # step, val_loss, val_loss_error and val_metrics: of the anchors, seconds
    # fragment, round, contributors, missed, stall_s, exchange_s, waited_for, work_steps: those that
    # this peer contributed; since the last one: steps, and step_s, the mean time of computing one
    "round",
    "round_failed",  # fragment, round, reason, waiting_for
    # step, fragments, steps: that are lost, steps_lost: of all times so far, times; parameters,
    # moments or a gradient were not finite, and are what they were before
    "put_back",
    "stalled",  # fragment, round, waiting_for, seconds so far, last_s: of the round before
    "early_start",  # fragment, round, step: an anchor that was fetched early is used
    "refused",  # reason, again, sender, round: a message that was not taken
    "member",  # peer_changed, health
    "enrolled",  # name, token: a peer was given its certificate
    "epoch",  # batches, of: an epoch, that this peer drew; the first one
    "awaiting",  # here, wanted: the number of peers that the start waits for; null: for the others
    "renewed",  # expires: this peer's own certificate was, until that day
    "unreachable",  # peers: that this one does not reach, though they are alive
    # step, steps; others: that go on; unsent_steps: in no round; apart: its model is its own
    "left",
    "handed_in",  # fragment, round, steps: that others have of this peer's, which leaves
    "preempted",  # source: of the notice that this machine will go away
    # donor, step, reason, confirmed_by: another peer's state was taken over; rounds_given_up: of
    # this peer's; kept_steps: inner steps of these that it contributes again; apart
    "adopted",
    "skipped",  # step, reason
    "resumed",  # path, step: goes on from a checkpoint of this peer's own
    "checkpoint",  # path, step, seconds
    "located",  # found or gone, verdict: as in a status document; see `verdict_words`
    "warning",  # text; stage
    "result",  # the final event of a worker: see worker/training/result.py
    "exit",  # exit_code, text: of a process, by its launcher
    "report",  # the final event of the coordinator: see coordinator/report.py
    # Of a model in stages:
    "iteration",  # iteration, visits, loss
    "late",  # iteration
    "dropped",  # iteration, microbatch, reason
    "discarded",  # iteration
    "rerouted",  # iteration, microbatch, stage
    "orphaned",  # iteration, microbatch, stage
    "unconfirmed",  # iteration, replica, microbatches: that may be lost with the replica
    "confirmed",  # iteration, replica, microbatches
    "lost",  # iteration, replica, microbatches
    "moves",  # stage, to
    "rebuilt",  # stage, from: the weight of each stage that it was made of
    "assembled",  # path, step
]

Event = Mapping[str, object]
Log = Callable[[dict[str, object]], None]  # takes events
Curve = list[tuple[int, float]]  # (inner step, training loss in nats)

_MAX_TEXT, _MOST = 20_000, 1e100
_MOST_WARNINGS, _MOST_BY_ONE = 32, 4


def new_event(kind: EventKind, **fields: object) -> dict[str, object]:
    return {"event": kind, **fields}


class Warnings:
    """Warning events, each told once: 32, and four by each peer, so that none takes others' place.
    Args: log: takes the events."""

    def __init__(self, log: Log) -> None:
        self._log, self._told = log, set[str]()
        self._by: Counter[str] = Counter()

    def add(self, text: str, detail: str = "", by: str = "") -> None:
        """Tells of it, if it is new. Args: detail: said with it; may differ the next time; by: the
        peer whose words or doing it is."""
        if text not in self._told and self._by[by] < (_MOST_BY_ONE if by else _MOST_WARNINGS):
            self._told.add(text)
            self._by[by] += 1
            self._log(new_event("warning", text=f"{text}: {detail}" if detail else text))


def int_of(event: Event, key: str) -> int | None:
    value = event.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def float_of(event: Event, key: str) -> float | None:
    """A number of which sums and quotients with others are finite too, else None."""
    value = event.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
        return float(value) if abs(value) > 1 / _MOST else 0.0
    return None


def text_of(event: Event, key: str) -> str | None:
    """Text that cannot steer a terminal, else None."""
    value = event.get(key)
    return printable(value[:_MAX_TEXT]) if isinstance(value, str) else None


def names_of(event: Event, key: str) -> list[str]:
    value = event.get(key)
    return [printable(str(name)) for name in value] if isinstance(value, list | tuple) else []


def curve_of(event: Event, key: str) -> Curve:
    """A list of [step, loss], without the points that are not finite numbers."""
    points = event.get(key)
    curve: Curve = []
    for point in points if isinstance(points, list | tuple) else ():
        if isinstance(point, list | tuple) and len(point) == 2:
            pair = {"step": point[0], "loss": point[1]}
            step, loss = int_of(pair, "step"), float_of(pair, "loss")
            if step is not None and loss is not None:
                curve.append((step, loss))
    return curve


def printable(text: str) -> str:
    """Replaces control characters other than newline and tab."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


def verdict_words(verdict: Mapping[str, object]) -> str:
    """A fault: `w2's uplink, 3.1 of 20 Mbit/s since 14:02, cost 4 % of rounds`."""
    kind, peer, to = (text_of(verdict, key) or "?" for key in ("kind", "peer", "to"))
    measured, usual = (float_of(verdict, key) or 0.0 for key in ("measured", "usual"))
    since = (text_of(verdict, "since") or "")[11:16] or "?"
    if kind in ("machine", "disk"):
        what = "a step" if kind == "machine" else "a checkpoint"
        figures = f"{seconds(measured)} {what}, others {seconds(usual)}"
    else:
        figures = f"{measured:.3g} of {usual:.3g} Mbit/s"
    place = f"the link from {peer} to {to}" if kind == "link" else f"{peer}'s {kind}"
    cost = float_of(verdict, "cost") or 0.0
    costs = f"cost {percent(cost, 0 if cost >= 0.01 else None)} of rounds" if cost else "no cost"
    return f"{place}, {figures} since {since}, {costs}"


def place_of(verdict: Mapping[str, object]) -> tuple[str, ...]:
    """The marks that tell faults apart: kind, peer, and of a link the receiver."""
    return tuple(text_of(verdict, key) or "" for key in ("kind", "peer", "to"))


def costliest(found: Iterable[Iterable[Event]]) -> list[Event]:
    """The faults that workers have located, each at the highest cost told, costliest first."""
    by_cost = sorted(chain.from_iterable(found), key=lambda each: -(float_of(each, "cost") or 0.0))
    by_place: dict[tuple[str, ...], Event] = {}
    for verdict in by_cost:
        by_place.setdefault(place_of(verdict), verdict)
    return list(by_place.values())
