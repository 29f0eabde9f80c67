"""Training as people see it: a live table, or plain lines."""

from collections import Counter
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Protocol

from coordinator.rendezvous.records import Record
from protos.figures import duration, megabytes, optional

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
