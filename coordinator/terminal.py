"""A swarm on a terminal: the summary of all peers, once or again and again."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from murmuration.coordinator.records import Record
from murmuration.protos.addresses import is_loopback
from murmuration.protos.events import costliest, names_of, verdict_words
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.protos.figures import duration
from murmuration.worker.views.history import History, Look
from murmuration.worker.views.summary import SwarmSummary, drawn_table, maps_of

_GONE_S = 30.0  # without any answer, before that is an error
_LAST_WORDS_S = 5.0  # at the end of a run: a mean over all, an evaluation
_WORDS = ("peer", "address", "state", "relayed by", "not taken")  # columns
_NOT_LIVE = ("address", "gradient norm")  # a terminal is narrower


class Screen:
    """Plain lines, one each two seconds unless it is the same, and each note; `began_s` is 0 s."""

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
        if (line := swarm.line()) != self._said:
            self._said = line
            self.note(line, now_s)

    def note(self, line: str, now_s: float) -> None:
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
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console, began_s) if live else Screen(console.file, began_s)


def swarm_table(
    swarm: SwarmSummary, elapsed: str = "", leave_out: Sequence[str] = _NOT_LIVE
) -> Table:
    """The figures of all, and a row for each peer."""
    run = f"run {swarm.run[:8]}, {swarm.preset}" if swarm.run else ""
    facts = "  ".join(filter(None, (run, elapsed, *(f"{n} {v}" for n, v in swarm.facts()))))
    title = "\n".join([facts, *(f"slow: {verdict}" for verdict in swarm.verdicts)])
    heads, rows = swarm.table(leave_out=leave_out)
    align = "".join("<" if head in _WORDS else ">" for head in heads)
    return drawn_table(heads, rows, align, title=title)


def summary_of_records(records: Sequence[Record], now_s: float) -> SwarmSummary:
    """Sums up workers by their events. Args: now_s: on the clock of `Record.heard_s`."""
    hold = [[each for each in record.verdicts if "until" not in each] for record in records]
    return SwarmSummary(
        peers=[record.seen(now_s) for record in records],
        verdicts=[verdict_words(verdict) for verdict in costliest(hold)],
    )


def watch(
    look: Callable[[], Look],
    screen: Screen | None,
    every_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows the swarm until Ctrl-C, or until it has ended. Args: screen: None prints JSON lines.
    Raises MurmurError: nobody answers at the beginning, or any more though the run was not over."""
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
            except MurmurError as error:
                if seen_s is None:
                    raise
                swarm, silent_s = history.summary(), began_s - seen_s
                # It has ended where every peer was done or had left, or had little left to do.
                left = bool(swarm.peers) and all(p.state in ("done", "left") for p in swarm.peers)
                if left or (swarm.left_s is not None and silent_s > swarm.left_s + _LAST_WORDS_S):
                    return
                if silent_s > _GONE_S:
                    text = f"no peer has answered for {_GONE_S:.0f} s; last seen: {swarm.line()}"
                    raise MurmurError(text, ExitCode.UNREACHABLE) from error
            sleep(max(0.0, began_s + every_s - clock()))
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until the end)
    finally:
        if screen is not None:
            screen.close()


def print_status(look: Look, console: Console) -> None:
    """Prints the same table once, and what the peer that was asked warns of."""
    history = History(0.0)
    history.add(look)
    swarm = history.summary()
    if not swarm.peers:
        console.print("no members are known yet")
    else:
        console.print(swarm_table(swarm, leave_out=()))
    for text in names_of(look.first, "warnings"):
        console.print(f"warning: {text}", markup=False, soft_wrap=True)
    addresses = [str(each.get("address", "")) for each in maps_of(look.first, "members")]
    one_machine = all(is_loopback(each.rpartition(":")[0].strip("[]")) for each in addresses)
    if look.first.get("encrypted") is False and not one_machine:
        console.print(
            "warning: nothing is encrypted (--insecure): others can read along, and anybody that "
            "reaches a port may join",
            soft_wrap=True,
        )
