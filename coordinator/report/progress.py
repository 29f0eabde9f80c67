"""Training as people see it: a line for each notable event, and a live table or plain lines."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Protocol

from coordinator.rendezvous.records import Record
from protos.events import (
    Event,
    float_of,
    given_up_words,
    int_of,
    located_words,
    names_of,
    place_of,
    printable,
    put_back_words,
    stall_words,
    text_of,
)
from protos.exit_codes import exit_words
from protos.figures import duration, measured, megabytes, optional
from protos.text import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_PLAIN_EVERY_S = 2.0
_LIVE_EVERY_S = 0.25
_BAR_WIDTH = 24


class ProgressScreen(Protocol):
    """Where progress is shown. Times are monotonic seconds, on the clock of `Record.heard_s`."""

    def update(self, records: Sequence[Record], now_s: float) -> None:
        """Shows the state of things, no more often than pleasant."""
        ...

    def note(self, line: str, now_s: float) -> None:
        """Shows a line that stays."""
        ...

    def close(self, records: Sequence[Record], now_s: float) -> None:
        """Shows the end, and leaves the terminal as it was."""
        ...


class PlainProgress:
    """One line every two seconds unless it would say the same again, and one for each notable
    event."""

    def __init__(self, stream: IO[str], began_s: float) -> None:
        self._stream, self._began_s = stream, began_s
        self._next_s = began_s
        self._said = ""

    def update(self, records: Sequence[Record], now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PLAIN_EVERY_S
        if (line := summary(records, now_s)) != self._said:
            self._said = line
            self._print(line, now_s)

    def note(self, line: str, now_s: float) -> None:
        self._print(line, now_s)

    def close(self, records: Sequence[Record], now_s: float) -> None:
        self._stream.flush()

    def _print(self, line: str, now_s: float) -> None:
        print(f"{now_s - self._began_s:.1f} s  {line}", file=self._stream, flush=True)


class LiveProgress:
    """A table that is drawn over itself: a row per worker."""

    def __init__(self, console: "Console", began_s: float) -> None:
        from rich.live import Live

        self._began_s = began_s
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._next_s = began_s
        self._open = False

    def update(self, records: Sequence[Record], now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + _LIVE_EVERY_S
        if not self._open:
            self._live.start()
            self._open = True
        self._live.update(progress_table(records, now_s, self._began_s), refresh=True)

    def note(self, line: str, now_s: float) -> None:
        from rich.text import Text

        self._live.console.print(Text(f"{now_s - self._began_s:.1f} s  {line}"), soft_wrap=True)

    def close(self, records: Sequence[Record], now_s: float) -> None:
        if self._open:
            self._live.update(progress_table(records, now_s, self._began_s), refresh=True)
            self._live.stop()
            self._open = False


def progress_for(console: "Console", began_s: float) -> ProgressScreen:
    """The live table where the console is a terminal, else plain lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, began_s)
    return PlainProgress(console.file, began_s)


def summary(records: Sequence[Record], now_s: float) -> str:
    """`step 240/1200  loss 2.31  rounds 9  sent 8.3 MB each  [4 training]`.

    Of the workers still at work, or at the end of those that reported: the smallest step, and means
    of loss and bytes.
    """
    states = Counter(record.shown_state(now_s) for record in records)
    standing = "[" + ", ".join(f"{number} {state}" for state, number in states.items()) + "]"
    active = [r for r in records if r.exit_code is None and r.result is None]
    active = active or [r for r in records if r.result is not None] or list(records)
    steps = max(record.steps for record in records)
    if not steps or not any(record.started for record in records):
        return f"starting  {standing}"
    parts = [f"step {min(r.step for r in active)}/{steps}"]
    losses = [record.loss for record in active if record.loss is not None]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.2f}")
    parts.append(f"rounds {max(record.rounds_completed for record in records)}")
    parts.append(f"sent {megabytes(sum(r.bytes_sent for r in active) / len(active))} each")
    return "  ".join([*parts, standing])


def progress_table(records: Sequence[Record], now_s: float, began_s: float) -> "Table":
    """A row per worker, with the elapsed time and what is left above."""
    from rich import box
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        title=_title(records, now_s, began_s),
        title_justify="left",
        title_style="dim",
    )
    staged = any(record.stage is not None for record in records)
    table.add_column("worker")
    if staged:
        table.add_column("stage", justify="right")
    table.add_column("step", min_width=_BAR_WIDTH)
    for name in ("", "loss", "rounds", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for record in records:
        state = record.shown_state(now_s)
        table.add_row(
            Text(record.peer),
            *([optional(record.stage, str)] if staged else []),
            ProgressBar(total=max(record.steps, 1), completed=record.step, width=_BAR_WIDTH),
            f"{record.step}/{record.steps or '?'}",
            "" if record.loss is None else f"{record.loss:.3f}",
            str(record.rounds_completed),
            megabytes(record.bytes_sent),
            megabytes(record.bytes_received),
            Text(state, style=_style(state)),
        )
    return table


def _title(records: Sequence[Record], now_s: float, began_s: float) -> str:
    elapsed = duration(now_s - began_s)
    active = [r for r in records if r.exit_code is None and r.result is None and r.started]
    remaining = [left for record in active if (left := record.remaining_s()) is not None]
    return f"{elapsed}, about {duration(max(remaining))} to go" if remaining else elapsed


def _style(state: str) -> str:
    if state in ("training", "done"):
        return "green"
    return "red" if state.startswith(("killed", "exit", "silent")) else "yellow"


_MAX_SEEN = 10_000
_MAX_LINE = 500  # characters
_WORSE = ("alive", "suspect", "dead")


class EventFormatter:
    """Turns events into lines for people. What several workers report alike is one line."""

    def __init__(self) -> None:
        self._starts: set[tuple[str, ...]] = set()
        self._health: dict[str, int] = {}
        self._located_at: set[tuple[str, ...]] = set()
        self._refusals: set[tuple[str | None, str | None, int | None]] = set()
        self._stall = ("", -1, 0.0)
        self._validated = -1  # up to this step
        self._warned: dict[str, set[str]] = {}  # peers by text, since it was last a line
        self._writers: dict[str, Callable[[Event], str | None]] = {
            "started": self._started,
            "round_failed": _round_failed,
            "put_back": put_back_words,
            "stalled": self._stalled,
            "adopted": _adopted,
            "located": self._located,
            "preempted": lambda _: "leaves: its machine will go away",
            "refused": self._refused,
            "warning": self._warning,
            "validation": self._validation,
            "moves": lambda event: (
                f"moves from stage {_stage(event, 'stage')} to {_stage(event, 'to')}"
            ),
            "rebuilt": _rebuilt,
            "member": self._member,
            "result": _result,
            "exit": _exit,
        }

    def line(self, event: Event) -> str | None:
        """The line for this event, or None where it is ordinary."""
        kind, peer = text_of(event, "event"), text_of(event, "peer") or "?"
        writer = self._writers.get(kind or "")
        words = writer(event) if writer else None
        who = "" if kind == "located" else peer  # whoever has found it
        return shown(" ".join(f"{who} {words}".split()), _MAX_LINE) if words else None

    def _started(self, event: Event) -> str | None:
        group, step = names_of(event, "group"), int_of(event, "step") or 0
        start = (*group, str(step))
        if start in self._starts or len(self._starts) >= _MAX_SEEN:
            return None
        self._starts.add(start)
        return f"starts training at step {step} with {', '.join(group) or 'nobody'}"

    def _warning(self, event: Event) -> str | None:
        """A line, unless it is of a stage and another worker has said it; again where one repeats
        itself."""
        text, peer = text_of(event, "text") or "?", text_of(event, "peer") or "?"
        if int_of(event, "stage") is not None:
            said = self._warned.setdefault(text, set()) if len(self._warned) < _MAX_SEEN else set()
            if said and peer not in said:
                said.add(peer)
                return None
            said.clear()
            said.add(peer)
        return f"warning: {text}"

    def _located(self, event: Event) -> str | None:
        """Once for all workers that find the same."""
        if (words := located_words(event)) is None:
            return None
        verdict = event["verdict"]
        assert isinstance(verdict, Mapping)
        place = place_of(verdict)
        found = event.get("found") is True
        if (place in self._located_at) is found or len(self._located_at) >= _MAX_SEEN:
            return None
        self._located_at.symmetric_difference_update([place])
        return words

    def _refused(self, event: Event) -> str | None:
        """Once for each peer, sender and round: a link that breaks often loses many shards."""
        refusal = text_of(event, "peer"), text_of(event, "sender"), int_of(event, "round")
        if refusal in self._refusals or len(self._refusals) >= _MAX_SEEN:
            return None
        self._refusals.add(refusal)
        words = "asks for it again" if event.get("again") is True else "refused"
        return f"{words}: {text_of(event, 'reason') or '?'}"

    def _stalled(self, event: Event) -> str | None:
        """Once for all workers of a round, and again when it has doubled."""
        late = ",".join(names_of(event, "waiting_for"))
        round_, seconds = int_of(event, "round") or 0, float_of(event, "seconds") or 0.0
        if self._stall[:2] == (late, round_) and seconds < 1.5 * self._stall[2]:
            return None
        self._stall = (late, round_, seconds)
        return f"waits in round {round_} for {stall_words(event)}"

    def _validation(self, event: Event) -> str | None:
        """Once for each step: where all agree on the anchor, all measure the same."""
        step, loss = int_of(event, "step"), float_of(event, "val_loss")
        if step is None or loss is None or step <= self._validated:
            return None
        self._validated = step
        told = measured(loss, float_of(event, "val_loss_error"))
        return f"measures a validation loss of {told} at step {step}"

    def _member(self, event: Event) -> str | None:
        """Doubts, deaths and returns; that a peer joins or leaves in good order is ordinary."""
        changed = text_of(event, "peer_changed") or "?"
        health = (text_of(event, "health") or "").lower()
        known = self._health.get(changed, 0)
        rank = _WORSE.index(health) if health in _WORSE else 0
        if rank == known or 0 < rank < known or len(self._health) >= _MAX_SEEN:
            return None  # known, or a slower witness of what is a line already
        self._health[changed] = rank
        return f"sees {changed} {'alive again' if rank == 0 else health}"


def _round_failed(event: Event) -> str:
    missing = names_of(event, "waiting_for")
    tail = f"; it waited for {', '.join(missing)}" if missing else ""
    return (
        f"gave up round {int_of(event, 'round')} of fragment {int_of(event, 'fragment')}: "
        f"{text_of(event, 'reason') or 'no reason given'}{tail}"
    )


def _adopted(event: Event) -> str:
    reason = text_of(event, "reason")
    return (
        f"took over the state of {text_of(event, 'donor') or '?'} at step {int_of(event, 'step')}"
        f"{f': {reason}' if reason else ''}"
        f"{', which nobody else has' if event.get('confirmed_by') == [] else ''}"
        f"{given_up_words(event)}"
    )


def _rebuilt(event: Event) -> str:
    parts_of = event.get("from")
    weights = {str(n): parts_of[n] for n in parts_of} if isinstance(parts_of, Mapping) else {}
    parts = [
        f"{100 * weight:.0f} % of stage {printable(stage)}"
        for stage in weights
        if (weight := float_of(weights, stage)) is not None
    ]
    return f"has rebuilt stage {_stage(event, 'stage')} from {' and '.join(parts) or 'nothing'}"


def _stage(event: Event, key: str) -> str:
    stage = int_of(event, key)
    return "?" if stage is None else str(stage)


def _result(event: Event) -> str:
    loss, step = float_of(event, "val_loss"), int_of(event, "step")
    words = "finished" if text_of(event, "reason") == "finished" else "ended"
    if loss is None:
        return f"{words} at step {step}"
    told = measured(loss, float_of(event, "val_loss_error"))
    return f"{words} at step {step}, validation loss {told}"


def _exit(event: Event) -> str | None:
    code = int_of(event, "exit_code")
    if code is None or exit_words(code) in ("done", "interrupted"):
        return None
    reason = text_of(event, "text")
    return f"has ended: {exit_words(code)}" + (f": {reason}" if reason else "")
