"""Events as lines for people, in one table: of this worker, or of all workers of a swarm."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

from murmuration.protos import events, figures
from murmuration.protos.addresses import is_loopback, public_address, split_address
from murmuration.protos.events import NO_END, Event, float_of, int_of, names_of, text_of
from murmuration.protos.exit_codes import exit_words
from murmuration.protos.files import print_line, takes_lines

_SILENCE_S = 30.0
_MAX_SEEN = 10_000
_MAX_LINE = 500  # characters
_WORSE = ("alive", "suspect", "dead")


class _Field:
    """A value in a template: `?` where it does not fit, for another process has written it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __format__(self, form: str) -> str:
        value = self._value
        if isinstance(value, list | tuple):
            return ", ".join(events.printable(str(name)) for name in value) or "nobody"
        if isinstance(value, str) and not form:
            return events.printable(value)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return "?"
        return format(value, form)


class _Fields(dict[str, object]):
    def __getitem__(self, key: str) -> _Field:
        return _Field(self.get(key))


def describe(event: Event, joins: str | None = "") -> str | None:
    """One line, if the event needs one. Args: joins: what to type behind `murmur join HOST:PORT` to
    be let in; None where the others are programs with loops of their own."""
    kind = str(event.get("event"))
    if kind == "listening":
        return _listening(event, joins)
    return _filled(_WORDS[kind], event) if kind in _WORDS else _computed(kind, event)


def _filled(words: str, event: Event, **more: object) -> str:
    return words.format_map(_Fields(event, **more))


def _listening(event: Event, joins: str | None) -> str:
    """Says where the peer listens. A command to join must work as it stands."""
    address = str(event["address"])
    first = public_address(address)
    host, port = split_address(first)
    origin = f" ({event['origin']}; --advertise says otherwise)" if event.get("origin") else ""
    only = ", from this machine only" if is_loopback(host) else ""
    said = f"{event['peer']} is reached at {address}{origin}{only}"
    if joins is None:
        return f"{said}; others join with --join {first}"
    how = f"machine joins with: murmur join {first} --listen 0.0.0.0:{port}"
    if only:
        how = f"worker here joins with: murmur join {first} --out runs/another"
    return f"{said}\nanother {how}{f' {joins}' if joins else ''}"


def _run(event: Event) -> str:
    """`382 thousand parameters, preset diloco, a round every 20 of 1,600 steps, ... on cpu`."""
    keys = ("parameters", "inner_steps", "steps", "tokens")
    number, period, steps, tokens = (int_of(event, key) for key in keys)
    of = f" of {steps:,}" if steps is not None and steps < NO_END else ""
    rounds = f"a round every {period:,}{of}" if period else f"without rounds{of}"
    rounds += " steps" if period or of else ""
    counted = f", {tokens:,} tokens a step" if tokens else ""
    named = f"{figures.parameters(number or 0)}, preset {event['preset']}, {rounds}"
    return f"{named}{counted}, on {event['device']}"


def page_event(url: str, token_path: Path | None) -> dict[str, object]:
    """Where readers show a token, it has the token's file, never the token."""
    kept = {"token_file": str(token_path)} if token_path else {}
    return events.new_event("page", url=url, **kept)


def page_words(event: Mapping[str, object], *, terminal: bool) -> str:
    """The same for a person. On a terminal the address is complete; a log has no secret."""
    url, kept = str(event["url"]), event.get("token_file")
    if kept is None:
        return f"the page of the swarm: {url}"
    if not terminal:
        return f"the page of the swarm: {url}#TOKEN, with what is in {kept}"
    return f"the page of the swarm: {url}#{Path(str(kept)).read_text().strip()}"


_AT_THE_END = {
    "settling": "settling: until the others are done too",
    "assembling": "assembling the model from its stages",
    "evaluating": "evaluating",
}


def _progress(event: Event) -> str | None:
    """`step 30/90  loss 2.346  rounds 2  sent 12.3 MB  800 tokens/s  1 min 05 s to go  3 peers`."""
    step, steps = int_of(event, "step") or 0, int_of(event, "steps") or NO_END
    parts = [f"step {step}" + (f"/{steps}" if steps < NO_END else "")]
    if (state := event.get("state")) != "training":
        words = _AT_THE_END.get(str(state))
        return words and f"{parts[0]}  {words}"
    if (loss := float_of(event, "loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    parts.append(f"rounds {int_of(event, 'rounds') or 0}")
    parts.append(f"sent {figures.megabytes(float_of(event, 'bytes_sent') or 0.0)}")
    pace = float_of(event, "steps_per_s")
    if tokens_per_s := float_of(event, "tokens_per_s"):
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    elif pace:
        parts.append(f"{pace:,.3g} steps/s")
    if pace and step < steps < NO_END:
        parts.append(f"{figures.duration((steps - step) / pace)} to go")
    if peers := int_of(event, "peers"):
        parts.append(figures.count(peers, "peer"))
    return "  ".join(parts)


def _validation_loss(event: Event) -> str:
    """`validation loss 1.258 ± 0.047, accuracy 0.91`; empty where it was not measured."""
    if (loss := float_of(event, "val_loss")) is None:
        return ""
    told = figures.measured(loss, float_of(event, "val_loss_error"))
    return f"validation loss {told}{figures.listed(event.get('val_metrics'))}"


def _adopted(event: Event) -> str:
    words = "took over {donor}'s state at step {step}: {reason}"
    if event.get("confirmed_by") == []:
        words += " (no third peer has it, to compare)"
    if int_of(event, "rounds_given_up"):  # what this peer had trained, and the state has not got
        words += "; its own last {rounds_given_up} rounds are given up, which were "
        words += "{far:.2g} % apart"
    words += "; {kept_steps} steps of these come again" if int_of(event, "kept_steps") else ""
    return _filled(words, event, far=100 * (float_of(event, "apart") or 0.0))


def _left(event: Event) -> str:
    line = f"left the run at step {_Field(event.get('step'))}"
    line += f" of {steps}" if (steps := int_of(event, "steps")) else ""
    if others := names_of(event, "others"):
        line += f"; going on: {', '.join(others)}"
    if unsent := int_of(event, "unsent_steps"):
        line += f"; {unsent} steps are in no round: they stay in this peer's model"
    if event.get("apart"):
        line += "; this model is this peer's own: with steps= a mean over all ends a run"
    return line


def _rebuilt(event: Event) -> str:
    """`rebuilt stage 1 from 25 % of stage 0 and 75 % of stage 2`."""
    said: Any = event.get("from")
    parts = [
        f"{figures.percent(weight, 0)} of stage {events.printable(str(stage))}"
        for stage in (said if isinstance(said, Mapping) else ())
        if (weight := float_of(said, stage)) is not None
    ]
    return f"rebuilt stage {_Field(event.get('stage'))} from {' and '.join(parts) or 'nothing'}"


_WORDS = {
    "relayed": "others cannot dial this peer: it is reached through {by}",
    "router_port": "others cannot dial this peer itself: the router leads {address} here",
    "enrolled": "let in {name} by token {token}",
    "renewed": "the certificate is renewed until {expires}",
    "metrics": "metrics for Prometheus at {url}",
    "started": "started at step {step} with {group}",
    "round": "round {round} of fragment {fragment}: {contributors} peers, {exchange_s:.2f} s under "
    "way, {stall_s:.2f} s waited for",
    "epoch": "drew {batches} of an epoch's {of} batches: schedules count these, not len(loader)",
    "skipped": "goes on at step {step}: {reason}",
    "handed_in": "the others were given the {steps} inner steps since the last round",
    "preempted": "{source} says that this machine will go away: leaving",
    "resumed": "goes on from {path} (--fresh starts from step 0)",
    "moves": "moves from stage {stage} to stage {to}",
    "warning": "warning: {text}",
    "checkpoint": "checkpoint {path}",
}


def _computed(kind: str, event: Event) -> str | None:
    match kind:
        case "run":
            return _run(event)
        case "page":
            return page_words(event, terminal=sys.stdout.isatty())
        case "awaiting":
            here, wanted = names_of(event, "here"), int_of(event, "wanted")
            more = None if wanted is None else figures.count(wanted - len(here), "more peer")
            return (
                f"waits for {more or 'the others'} to start (here: {', '.join(here) or 'nobody'})"
            )
        case "progress":
            return _progress(event)
        case "validation" if words := _validation_loss(event):
            return f"step {_Field(event.get('step'))}  {words}"
        case "round_failed":
            missed = names_of(event, "waiting_for")
            late = f"; it waited for {', '.join(missed)}" if missed else ""
            return _filled("round {round} of fragment {fragment} failed: {reason}", event) + late
        case "stalled":
            late = ", ".join(names_of(event, "waiting_for")) or "its end"
            words = "round {round} waits for {late}: {seconds:.0f} s so far"
            return _filled(f"{words}, the last round took {{last_s:.1f}} s", event, late=late)
        case "put_back":
            what = "parameters" if event.get("fragments") else "moments of the optimizer"
            words = "not finite at step {step}: back to what they were before; {steps} inner steps"
            return f"{what} {_filled(words, event)} lost, {_Field(event.get('steps_lost'))} so far"
        case "refused":
            again = "; it is sent again" if event.get("again") is True else ""
            return _filled("a message of {sender} is not taken: {reason}", event) + again
        case "located" if isinstance(verdict := event.get("verdict"), Mapping):
            found = "slow" if event.get("found") is True else "no longer slow"
            return f"{found}: {events.verdict_words(verdict)}"
        case "left":
            return _left(event)
        case "adopted":
            return _adopted(event)
        case "rebuilt":
            return _rebuilt(event)
        case "member":
            how = "has left" if event.get("health") == "left" else "is {health}"
            return _filled("{peer_changed} " + how, event)
        case "unreachable":
            told = "does not reach {peers}, alive all the same: check that port and the link"
            return _filled(told, event) if names_of(event, "peers") else "reaches every peer again"
        case "result":
            loss = f"{words}, " if (words := _validation_loss(event)) else ""
            words = "{reason} at step {step}: {loss}{rounds_completed} rounds, anchor {anchor_hash}"
            return _filled(words, event, loss=loss)
        case "exit" if (code := int_of(event, "exit_code")) is not None:
            reason, ended = text_of(event, "text"), exit_words(code)
            quiet = ended in ("done", "interrupted")
            return None if quiet else ended + (f": {reason}" if reason else "")
    return None


class _Lasting:
    waits = False  # until what is written is taken, else it may be left out

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            if self.waits or takes_lines(self._stream):
                print(text, end="", file=self._stream, flush=True)
        except OSError:  # what is held by now has to go somewhere too, at the end at the latest
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def lasting(stream: IO[str]) -> IO[str]:
    """Returns one that prints nothing more once the reader has gone, or the disk is full."""
    return cast(IO[str], _Lasting(stream))


# What a person must know or act on.
_NEEDED = (
    "listening", "located", "relayed", "metrics", "page", "preempted", "result", "resumed",
    "put_back", "round_failed", "router_port", "stalled", "warning",
)  # fmt: skip


def announce_as_json(event: Event) -> None:
    print_line(json.dumps(event), waits=True)


class PlainLines:
    """Prints a worker's events for a person. Training is a line for each round, and for 30 s
    without one. Args: verbosity: 1 for each report and each round's times; -1 without what goes its
    usual way; spell: puts options into the words of the caller."""

    def __init__(
        self, joins: str | None = "", verbosity: int = 0, spell: Callable[[str], str] = str
    ) -> None:
        self._joins, self._verbosity, self._spell = joins, verbosity, spell
        self._rounds: object = None
        self._trained_s = -_SILENCE_S

    def __call__(self, event: Event) -> None:
        if self._is_wanted(event) and (line := describe(event, self._joins)) is not None:
            stamp = ""
            if "at" in event:  # `14:02:31+0100   12.3 s  `
                at = datetime.fromisoformat(str(event["at"]))
                stamp = f"{at:%H:%M:%S%z} {float(str(event['time_s'])):7.1f} s  "
            print_line(f"{stamp}{self._spell(line)}")

    def _is_wanted(self, event: Event) -> bool:
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


_TOLD_OF_ALL = (
    "started", "round_failed", "put_back", "stalled", "adopted", "located", "preempted", "refused",
    "warning", "validation", "moves", "rebuilt", "member", "result", "exit",
)  # fmt: skip


class SwarmLines:
    """Notable events of all workers of a swarm as lines: what several report alike is one line."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()
        self._health: dict[str, int] = {}
        self._stalled_s: dict[tuple[object, ...], float] = {}
        self._warned: dict[str, set[str]] = {}  # peers by text, since it was last a line

    def line(self, event: Event) -> str | None:
        kind, peer = text_of(event, "event") or "", text_of(event, "peer") or "?"
        words = describe(event) if kind in _TOLD_OF_ALL else None
        if not words or not self._is_news(kind, peer, event):
            return None
        who = "" if kind == "located" else f"{peer}: "  # several find the same
        return figures.shown(" ".join(f"{who}{words}".split()), _MAX_LINE)

    def _is_news(self, kind: str, peer: str, event: Event) -> bool:
        match kind:
            case "started":
                return self._is_first(*names_of(event, "group"), int_of(event, "step"))
            case "refused":  # a link that breaks often loses many shards
                return self._is_first(peer, text_of(event, "sender"), int_of(event, "round"))
            case "validation":  # where all agree on the anchor, all measure the same
                return self._is_first(kind, int_of(event, "step"))
            case "located":  # until it is gone
                verdict = event["verdict"]
                assert isinstance(verdict, Mapping)
                place = (kind, *events.place_of(verdict))
                if event.get("found") is True:
                    return self._is_first(*place)
                known = place in self._seen
                self._seen.discard(place)
                return known
            case "stalled":  # once for all workers of a round, and again when it has doubled
                key = (*names_of(event, "waiting_for"), int_of(event, "round"))
                seconds, before_s = float_of(event, "seconds") or 0.0, self._stalled_s.get(key)
                if before_s is not None and seconds < 1.5 * before_s:
                    return False
                self._stalled_s = {key: seconds}
            case "warning" if int_of(event, "stage") is not None:
                # Not if another worker has said it; again where one repeats it.
                text, room = text_of(event, "text") or "?", len(self._warned) < _MAX_SEEN
                said = self._warned.setdefault(text, set()) if room else set()
                if said and peer not in said:
                    said.add(peer)
                    return False
                said.clear()
                said.add(peer)
            case "member":  # doubts, deaths and returns: the rest is ordinary
                changed, health = (text_of(event, key) or "" for key in ("peer_changed", "health"))
                rank = _WORSE.index(health.lower()) if health.lower() in _WORSE else 0
                before = self._health.get(changed, 0)
                if rank == before or 0 < rank < before or len(self._health) >= _MAX_SEEN:
                    return False  # known, or a slower witness of what is a line already
                self._health[changed] = rank
        return True

    def _is_first(self, *key: object) -> bool:
        if key in self._seen or len(self._seen) >= _MAX_SEEN:
            return False
        self._seen.add(key)
        return True
