"""A swarm on a terminal: one status document, or the summary of all peers again and again.

Documents grow with the versions of workers: what is not known here is shown all the same, in the
units that the names of its keys tell (`_bytes`, `_s`, `_ms`, `_mbps`).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from murmuration.coordinator import Failure
from murmuration.coordinator.records import Record
from murmuration.protos.addresses import is_loopback
from murmuration.protos.events import costliest, float_of, names_of, printable, verdict_words
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.figures import duration, size
from murmuration.protos.figures import shown as cut
from murmuration.worker.views.history import History, Look
from murmuration.worker.views.summary import Document, SwarmSummary, drawn_table, map_of, maps_of

_GONE_S = 30.0  # without any answer, before that is an error
_LAST_WORDS_S = 5.0  # at the end of a run: a mean over all, an evaluation
_WORDS = ("peer", "state", "relayed by", "not taken")  # columns
_PAGE_ONLY = ("gradient norm",)  # a terminal is narrower

# ------------------------------------------------------------------------------- again and again


class Screen:
    """Plain lines: one each two seconds, unless it would say the same again, and one for each note.

    Args:
        began_s: since when seconds are counted, on the clock of `update` and `note`.
    """

    every_s = 2.0

    def __init__(self, stream: IO[str], began_s: float) -> None:
        self._stream, self._began_s, self._next_s = stream, began_s, began_s
        self._said = ""

    def update(self, swarm: Callable[[], SwarmSummary], now_s: float) -> None:
        """Shows how it is, no more often than is pleasant."""
        if now_s >= self._next_s:
            self._next_s = now_s + self.every_s
            self.show(swarm(), now_s)

    def show(self, swarm: SwarmSummary, now_s: float) -> None:
        """Shows how it is."""
        if (line := swarm.line()) != self._said:
            self._said = line
            self.note(line, now_s)

    def note(self, line: str, now_s: float) -> None:
        """Shows a line that stays."""
        print(f"{now_s - self._began_s:.1f} s  {line}", file=self._stream, flush=True)

    def close(self, swarm: SwarmSummary | None = None) -> None:
        """Leaves the terminal as it was. Args: swarm: how it is at the end."""


class LiveScreen(Screen):
    """A table that is drawn over itself, with a row for each peer."""

    every_s = 0.25

    def __init__(self, console: Console, began_s: float) -> None:
        super().__init__(console.file, began_s)
        self._live = Live(console=console, auto_refresh=False)

    def show(self, swarm: SwarmSummary, now_s: float) -> None:
        self._live.start()
        self._live.update(swarm_table(swarm, duration(now_s - self._began_s)), refresh=True)

    def note(self, line: str, now_s: float) -> None:
        self._live.console.print(Text(f"{now_s - self._began_s:.1f} s  {line}"), soft_wrap=True)

    def close(self, swarm: SwarmSummary | None = None) -> None:
        if swarm is not None and self._live.is_started:
            self.show(swarm, time.monotonic())
        self._live.stop()


def screen_for(console: Console, began_s: float) -> Screen:
    """The live table where the console is a terminal, else plain lines."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console, began_s) if live else Screen(console.file, began_s)


def swarm_table(swarm: SwarmSummary, elapsed: str = "") -> Table:
    """The figures of all, and a row for each peer."""
    run = f"run {swarm.run[:8]}, {swarm.preset}" if swarm.run else ""
    lines = ["  ".join(filter(None, (run, elapsed, *(f"{n} {v}" for n, v in swarm.facts()))))]
    lines += [f"slow: {verdict}" for verdict in swarm.verdicts]
    heads, rows = swarm.table(leave_out=_PAGE_ONLY)
    align = "".join("<" if head in _WORDS else ">" for head in heads)
    return drawn_table(heads, rows, align, title="\n".join(lines))


def summary_of_records(records: Sequence[Record], now_s: float) -> SwarmSummary:
    """Sums up workers by their events. Args: now_s: on the clock of `Record.heard_s`."""
    found = costliest(
        [each for each in record.verdicts if "until" not in each] for record in records
    )
    return SwarmSummary(
        peers=[record.seen(now_s) for record in records],
        verdicts=[verdict_words(verdict) for verdict in found],
    )


def watch(
    look: Callable[[], Look],
    screen: Screen | None,
    every_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the swarm until Ctrl-C, or until it has ended. Args: screen: None prints JSON lines.

    Raises:
        Failure: nobody answers at the beginning, or any more though the run was not over.
    """
    history, seen_s, shown_s = History(every_s), None, 0.0
    try:
        while True:
            began_s = clock()
            try:
                now = look()
                history.add(now)
                seen_s = began_s
                if screen is None:
                    print(json.dumps(history.since(shown_s)), flush=True)
                else:
                    screen.show(history.summary(), clock())
                shown_s = now.time_s
            except Failure as error:
                if seen_s is None:
                    raise
                if _is_over(history.summary(), began_s - seen_s):
                    return
                if began_s > seen_s + _GONE_S:
                    last = history.summary().line()
                    text = f"no peer has answered for {_GONE_S:.0f} s; last seen: {last}"
                    raise Failure(text, ExitCode.UNREACHABLE) from error
            sleep(max(0.0, began_s + every_s - clock()))
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until the end)
    finally:
        if screen is not None:
            screen.close()


def _is_over(swarm: SwarmSummary, later_s: float) -> bool:
    """Tells whether silence after this many seconds is that of a run that has ended: every peer was
    done or had left, or had little left to do."""
    if swarm.peers and all(peer.state in ("done", "left") for peer in swarm.peers):
        return True
    return swarm.left_s is not None and later_s > swarm.left_s + _LAST_WORDS_S


# --------------------------------------------------------------------------- one status document

_FOR_PROGRAMS = ("recent_rounds", "waiting_s", "measured")  # the page draws them
_MAX_TEXT = 300  # characters that a peer has written
_SHORT_S = 60
_WAYS = ("sent", "received")
_UNITS = ("bytes", "ms", "s", "mbps")
_PER_S = "_per_s"
Show = Callable[[float], str]


def print_status(document: Document, console: Console) -> None:
    """Prints whatever the document holds; no key but `members` is expected."""
    console.print(two_columns(fact_lines(document)))
    if rows := traffic_rows(document):
        console.print(_table("traffic", rows))
    for key, value in document.items():
        if _is_table(value) and key not in ("verdicts", *_FOR_PROGRAMS):
            console.print(_table(_words(key), value))
    for text in names_of(document, "warnings"):
        console.print(f"warning: {text}", markup=False, soft_wrap=True)
    for verdict in maps_of(document, "verdicts"):
        console.print(f"slow: {verdict_words(verdict)}", markup=False, soft_wrap=True)
    if not document.get("members"):
        console.print("no members are known yet")
    if document.get("encrypted") is False and not _on_one_machine(document):
        console.print(
            "warning: nothing is encrypted (--insecure): others can read along, and anybody that "
            "reaches a port may join",
            soft_wrap=True,
        )


def two_columns(lines: Sequence[tuple[str, str]], styles: Mapping[str, str] = {}) -> Padding:
    """Labels, and what they stand for. Args: styles: of values, by label."""
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(label, Text(value, style=styles.get(label, "")))
    return Padding(grid, (0, 0, 0, 2), expand=False)


def _on_one_machine(document: Document) -> bool:
    """Tells whether the addresses of all members are of this machine alone."""
    addresses = [str(each.get("address", "")) for each in maps_of(document, "members")]
    return all(is_loopback(each.rpartition(":")[0].strip("[]")) for each in addresses)


def fact_lines(document: Document) -> list[tuple[str, str]]:
    """(label, value) of what is no table."""
    elsewhere = ("members", "verdicts", "warnings", *_FOR_PROGRAMS)
    facts = {k: v for k, v in document.items() if k not in elsewhere and not _is_table(v)}
    if facts.get("step") is not None and facts.get("steps") is not None:
        facts["step"] = f"{shown('step', facts['step'])} of {shown('steps', facts.pop('steps'))}"
    if isinstance(traffic := facts.pop("traffic", None), Mapping):
        facts |= {f"traffic_{key}": traffic[key] for key in traffic if _flow(key) is None}
    return [
        (f"{_words(key)} a second" if key.endswith("_per_s") else _words(key), shown(key, value))
        for key, value in facts.items()
    ]


def traffic_rows(document: Document) -> list[dict[str, object]]:
    """The bytes each way: in all, of it payload, and by method, the most first; with the mean rate
    where the document says since when."""
    flows: dict[str, dict[str, float]] = {}
    for key, value in map_of(document, "traffic").items():
        if (flow := _flow(key)) is not None:
            name, way = flow
            counts = value if isinstance(value, Mapping) else {name: value}
            for each in counts:
                flows.setdefault(str(each), {})[way] = float_of(counts, each) or 0.0
    up_s = float_of(document, "up_s")
    rows: list[dict[str, object]] = []
    for name, sums in sorted(flows.items(), key=lambda flow: -sum(flow[1].values())):
        row: dict[str, object] = {"": name}
        row |= {f"{way}_bytes": sums.get(way, 0.0) for way in _WAYS}
        if up_s:
            row |= {f"mean_{way}_mbps": 8e-6 * sums.get(way, 0.0) / up_s for way in _WAYS}
        rows.append(row)
    return rows


def shown(key: str, value: object, unit: Show | None = None) -> str:
    """A value in one line, in the unit of its key, else in that of what it is in."""
    unit = _unit(key) or unit
    if isinstance(value, Mapping):
        return ", ".join(_pair(str(k), v, unit) for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(shown(key, item, unit) for item in value) or "none"
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int | float) and not isinstance(value, bool):
        if unit is not None:
            return unit(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return cut(str(value), _MAX_TEXT)


def _flow(key: object) -> tuple[str, str] | None:
    """The row and the column of a key of `traffic`; None of one that is not known."""
    for way in _WAYS:
        if key == f"{way}_by_method":
            return "", way
        if key == f"bytes_{way}":
            return "in all", way
        if str(key).endswith(f"_bytes_{way}"):
            return _words(str(key).removesuffix(f"_{way}")), way
    return None


def _pair(key: str, value: object, unit: Show | None) -> str:
    inner = shown(key, value, unit)
    return f"{_words(key)} ({inner})" if isinstance(value, Mapping) else f"{_words(key)} {inner}"


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _table(title: str, rows: Sequence[Document]) -> Table:
    heads, columns, align = [], [], ""
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        rounds = key == "versions"  # of each fragment, how many are closed
        numeric = rounds or all(isinstance(value, int | float | None) for value in values)
        heads.append("round" if rounds else _words(key))
        align += ">" if numeric else "<"
        columns.append([_span(v) if rounds else shown(key, v) for v in values])
    return drawn_table(heads, list(zip(*columns, strict=True)), align, title=title)


def _span(versions: object) -> str:
    """`4`, or `4 to 5` of fragments that are not equally far."""
    numbers = versions if isinstance(versions, list) else []
    ends = dict.fromkeys((min(numbers), max(numbers))) if numbers else {}
    return " to ".join(shown("round", end) for end in ends) or "-"


def _unit(key: str) -> Show | None:
    parts = key.split("_")
    if key.endswith(_PER_S):
        return lambda value: f"{value:,.4g}/s" if value < 1000 else f"{value:,.0f}/s"
    if "bytes" in parts:
        return size
    if "mbps" in parts:
        return lambda value: f"{value:,.2f} Mbit/s"
    if "ms" in parts:
        return lambda value: f"{value:,.1f} ms"
    if "s" in parts:
        return _seconds
    return (lambda value: f"{value:.3f}") if "loss" in parts else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _SHORT_S else duration(seconds)


def _words(key: str) -> str:
    """`bytes_sent` as people say it; units stand with the values."""
    parts = key.removesuffix(_PER_S).split("_")
    return printable(" ".join(part for part in parts if part not in _UNITS))
