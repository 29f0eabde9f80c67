"""A worker's events as lines, for a person or a program."""

import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime

from protos.addresses import is_loopback, split_address
from protos.events import (
    float_of,
    given_up_words,
    int_of,
    located_words,
    put_back_words,
    stall_words,
)
from protos.figures import count, duration, listed, measured, megabytes, parameters, percent
from protos.files import print_line
from protos.web import page_words

_SILENCE_S = 30.0
NO_END = 1 << 40  # steps of a run that ends when its loops do
# What a person must know or act on.
_NEEDED = frozenset(
    {
        "listening",
        "located",
        "relayed",
        "metrics",
        "page",
        "preempted",
        "result",
        "resumed",
        "put_back",
        "round_failed",
        "stalled",
        "warning",
    }
)
_AT_THE_END = {
    "settling": "settling: until the others are done too",
    "assembling": "assembling the model from its stages",
    "evaluating": "evaluating",
}


def announce_as_json(event: Mapping[str, object]) -> None:
    """Prints an event for a program: one line of JSON."""
    print_line(json.dumps(event))


class PlainLines:
    """Prints a worker's events for a person: behind the time of day with its zone, and the seconds
    since the start. Training is a line for each round, and for 30 s without one.

    Args:
        joins: as `describe` takes it.
        verbosity: 1 for each report of the training and each round's times; -1 without what goes
            its usual way.
        spell: puts options into the words of the caller.
    """

    def __init__(
        self, joins: str | None = "", verbosity: int = 0, spell: Callable[[str], str] = str
    ) -> None:
        self._joins, self._verbosity, self._spell = joins, verbosity, spell
        self._rounds: object = None
        self._trained_s = -_SILENCE_S

    def __call__(self, event: Mapping[str, object]) -> None:
        if self._is_wanted(event) and (line := describe(event, self._joins)) is not None:
            print_line(f"{_stamp(event)}{self._spell(line)}")

    def _is_wanted(self, event: Mapping[str, object]) -> bool:
        if self._verbosity > 0:
            return True
        if self._verbosity < 0:
            return event["event"] in _NEEDED
        if event["event"] == "progress" and event.get("state") == "training":
            rounds, now_s = event.get("rounds"), float(str(event.get("time_s", 0.0)))
            if rounds == self._rounds and now_s - self._trained_s < _SILENCE_S:
                return False
            self._rounds, self._trained_s = rounds, now_s
        return event["event"] != "round"


def _stamp(event: Mapping[str, object]) -> str:
    """`14:02:31+0100   12.3 s  `; empty for an event without a time."""
    if "at" not in event:
        return ""
    at = datetime.fromisoformat(str(event["at"]))
    return f"{at:%H:%M:%S%z} {float(str(event['time_s'])):7.1f} s  "


def describe(event: Mapping[str, object], joins: str | None = "") -> str | None:
    """One line, None for an event that needs none.

    Args: joins: what to type behind `murmur join HOST:PORT` to be let in; None where the others
        are programs with loops of their own.
    """
    match event["event"]:
        case "run":
            return _run(event)
        case "listening":
            return _listening(event, joins)
        case "relayed":
            by = event["by"]
            names = " and ".join(by) if isinstance(by, list) else ""
            return f"others cannot dial this peer: it is reached through {names}"
        case "enrolled":
            return f"let in {event['name']} by token {event['token']}"
        case "renewed":
            return f"the certificate is renewed until {event['expires']}"
        case "metrics":
            return f"metrics for Prometheus at {event['url']}"
        case "page":
            return page_words(event, terminal=sys.stdout.isatty())
        case "awaiting":
            here, wanted = event["here"], event["wanted"]
            if not isinstance(here, list):
                return None
            missing = "the others"
            if isinstance(wanted, int):
                missing = count(wanted - len(here), "more peer")
            return f"waits for {missing} to start (here: {', '.join(here) or 'nobody'})"
        case "started":
            group = event["group"]
            names = ", ".join(group) if isinstance(group, list) else ""
            return f"started at step {event['step']} with {names}"
        case "progress" if event.get("state") == "training":
            return _progress(event)
        case "progress" if (words := _AT_THE_END.get(str(event.get("state")))) is not None:
            return f"{_step(event)}  {words}"
        case "validation":
            figures = listed(event.get("val_metrics"))
            return f"step {event['step']}  validation loss {_loss(event)}{figures}"
        case "round":
            return (
                f"round {event['round']} of fragment {event['fragment']}: "
                f"{event['contributors']} peers, {event['exchange_s']:.2f} s under way, "
                f"{event['stall_s']:.2f} s waited for"
            )
        case "round_failed":
            return f"round {event['round']} failed: {event['reason']}"
        case "put_back":
            return put_back_words(event)
        case "stalled":
            return f"round {event['round']} waits for {stall_words(event)}"
        case "skipped":
            return f"goes on at step {event['step']}: {event['reason']}"
        case "refused":
            again = "; it is sent again" if event.get("again") else ""
            return f"a message of {event['sender']} is not taken: {event['reason']}{again}"
        case "located":
            return located_words(event)
        case "left":
            return _left(event)
        case "preempted":
            return f"{event['source']} says that this machine will go away: leaving"
        case "adopted":
            nobody = event.get("confirmed_by") == []
            alone = " (on its word alone: nobody else has it)" if nobody else ""
            return (
                f"took over {event['donor']}'s state at step {event['step']}: {event['reason']}"
                f"{alone}{given_up_words(event)}"
            )
        case "resumed":
            return f"goes on from {event['path']} (--fresh starts from step 0)"
        case "moves":
            return f"moves from stage {event['stage']} to stage {event['to']}"
        case "rebuilt":
            return f"rebuilt stage {event['stage']} from {_parts(event['from'])}"
        case "member":
            left = event["health"] == "left"
            return f"{event['peer_changed']} {'has' if left else 'is'} {event['health']}"
        case "unreachable":
            if not isinstance(peers := event["peers"], list) or not peers:
                return "reaches every peer again"
            named = ", ".join(peers)
            return f"does not reach {named}, alive all the same: check that port and the link"
        case "warning":
            return f"warning: {event['text']}"
        case "checkpoint":
            return f"checkpoint {event['path']}"
        case "result":
            figures = listed(event.get("val_metrics"))
            known = float_of(event, "val_loss") is not None
            scored = f"validation loss {_loss(event)}{figures}, " if known else ""
            return (
                f"{event['reason']} at step {event['step']}: {scored}"
                f"{event['rounds_completed']} rounds, anchor {event['anchor_hash']}"
            )
        case _:
            return None


def _loss(event: Mapping[str, object]) -> str:
    return measured(float_of(event, "val_loss") or 0.0, float_of(event, "val_loss_error"))


def _left(event: Mapping[str, object]) -> str:
    """How a loop has ended before its run."""
    line = f"left the run at step {event['step']}"
    if isinstance(others := event["others"], list) and others:
        line += f"; going on: {', '.join(others)}"
    if unsent := event["unsent_steps"]:
        line += f"; {unsent} steps are in no round: they stay in this peer's model"
    if event["apart"]:
        line += "; this model is this peer's own: with steps= a mean over all ends a run"
    return line


def _run(event: Mapping[str, object]) -> str:
    """`382 thousand parameters, preset diloco, a round every 20 of 1,600 steps, ... on cpu`."""
    number, period, steps, tokens = (
        int_of(event, key) for key in ("parameters", "inner_steps", "steps", "tokens")
    )
    of = f" of {steps:,}" if steps is not None and steps < NO_END else ""
    rounds = (
        f"a round every {period:,}{of} steps" if period else f"without rounds{of and of + ' steps'}"
    )
    counted = f", {tokens:,} tokens a step" if tokens else ""
    named = f"{parameters(number or 0)}, preset {event['preset']}, {rounds}"
    return f"{named}{counted}, on {event['device']}"


def _progress(event: Mapping[str, object]) -> str:
    """`step 30/90  loss 2.346  rounds 2  sent 12.3 MB  800 tokens/s  1 min 05 s to go  3 peers`."""
    loss, pace = float_of(event, "loss"), float_of(event, "steps_per_s")
    parts = [_step(event)]
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    parts += [
        f"rounds {event['rounds']}",
        f"sent {megabytes(float_of(event, 'bytes_sent') or 0.0)}",
    ]
    if tokens_per_s := float_of(event, "tokens_per_s"):
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    elif pace:
        parts.append(f"{pace:,.3g} steps/s")
    step, steps = int_of(event, "step") or 0, int_of(event, "steps") or 0
    if pace and step < steps < NO_END:
        parts.append(f"{duration((steps - step) / pace)} to go")
    if peers := int_of(event, "peers"):
        parts.append(count(peers, "peer"))
    return "  ".join(parts)


def _step(event: Mapping[str, object]) -> str:
    steps = int_of(event, "steps")
    return f"step {event['step']}{f'/{steps}' if steps is not None and steps < NO_END else ''}"


def _listening(event: Mapping[str, object], joins: str | None) -> str:
    """Where a peer is reached, and what to type to join it: that must work as it stands."""
    address = str(event["address"])
    host, port = split_address(address)
    origin = f" ({event['origin']}; --advertise says otherwise)" if event.get("origin") else ""
    said = f"{event['peer']} is reached at {address}{origin}"
    if joins is None:
        only = ", from this machine only" if is_loopback(host) else ""
        return f"{said}{only}; others join with --join {address}"
    by = f" {joins}" if joins else ""
    if is_loopback(host):
        return (
            f"{said}, from this machine only\n"
            f"another worker here joins with: murmur join {address} --out runs/another{by}"
        )
    return f"{said}\nanother machine joins with: murmur join {address} --listen 0.0.0.0:{port}{by}"


def _parts(weights: object) -> str:
    """`25 % of stage 0 and 75 % of stage 2`."""
    assert isinstance(weights, Mapping)
    return " and ".join(f"{percent(weight, 0)} of stage {n}" for n, weight in weights.items())
