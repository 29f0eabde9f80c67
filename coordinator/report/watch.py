"""`murmur status --watch`: all peers of a swarm, asked again and again, as a table that stays.

One peer says who there is; each of them is then asked itself. A peer that cannot be reached from
here is shown as the others know it. Should the first one end, any other will do.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

from coordinator import Failure
from coordinator.report.status import TIMEOUT_S
from coordinator.report.status import ask as ask_for_status
from protos.addresses import split_relayed
from protos.events import float_of, int_of, printable, text_of, verdict_words
from protos.exit_codes import ExitCode
from protos.figures import duration, optional, rate, seconds, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PEER_S = 1.5  # for one peer's answer, once the first has come
_AT_ONCE = 16
_GONE_S = 30.0  # without any answer, before that is an error
_LAST_WORDS_S = 5.0  # at the end of a run: a mean over all, an evaluation
_LIVE = ("alive", "suspect", "lost")  # `lost` is a coordinator's word for one that may be back

Document = Mapping[str, Any]
Ask = Callable[[str, float], Document]


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """One peer, by its own word where it has answered, else as another knows it: None is not known.

    `rtt_ms` is the round trip from the peer that was asked first, and `path` how others reach the
    peer: `direct`, or by whom it is relayed. `not_taken` counts by reason:
    messages that were refused, own rounds that failed, and such that closed without the peer.
    """

    peer: str
    answers: bool
    stage: int | None
    state: str
    step: int
    steps: int | None
    rounds: int | None
    loss: float | None
    val_loss: float | None
    steps_per_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    rtt_ms: float | None
    path: str | None
    bytes_sent: int | None
    bytes_received: int | None
    sent_mbps: float | None
    received_mbps: float | None
    not_taken: Mapping[str, int]

    @property
    def left_s(self) -> float | None:
        """How long the rest takes at the pace of now."""
        if self.steps is None or not self.steps_per_s:
            return None
        return max(0, self.steps - self.step) / self.steps_per_s


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A swarm at one moment. `time_s`: seconds since 1970. `verdicts`: the faults that a peer has
    located, as its status document has them."""

    time_s: float
    run: str
    preset: str
    rows: Sequence[PeerRow]
    verdicts: Sequence[Document] = ()

    @property
    def training(self) -> list[PeerRow]:
        """Those at work."""
        return [row for row in self.rows if row.state == "training"]

    @property
    def step(self) -> int:
        """Of the peer at work that is least far; when none is, of the one that came furthest."""
        if self.training:
            return min(row.step for row in self.training)
        return max((row.step for row in self.rows), default=0)

    @property
    def steps(self) -> int | None:
        """Of the whole run."""
        return max((row.steps for row in self.rows if row.steps is not None), default=None)

    @property
    def left_s(self) -> float | None:
        """How long the slowest peer still needs."""
        return max((r.left_s for r in self.training if r.left_s is not None), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all peers together; None where the task does not count in tokens."""
        told = [row.tokens_per_s for row in self.training if row.tokens_per_s is not None]
        return sum(told) if told else None

    def over_by(self, later_s: float) -> bool:
        """Whether silence after this many seconds is that of a run that has ended: every peer was
        done or had left, or had little left to do."""
        if self.rows and all(row.state in ("done", "left") for row in self.rows):
            return True
        return self.left_s is not None and later_s > self.left_s + _LAST_WORDS_S

    def plain(self) -> dict[str, object]:
        """One JSON object."""
        return {
            "time_s": round(self.time_s, 3),
            "run": self.run,
            "preset": self.preset,
            "step": self.step,
            "steps": self.steps,
            "left_s": None if self.left_s is None else round(self.left_s, 1),
            "tokens_per_s": self.tokens_per_s,
            "verdicts": [dict(verdict) for verdict in self.verdicts],
            "peers": [asdict(row) for row in self.rows],
        }


@dataclass
class Watch:
    """Asks a swarm, and remembers what rates are made of.

    Args:
        address: HOST:PORT of the worker or coordinator to begin with.
        ask: as `coordinator.report.status.ask`.
        clock, sleep: monotonic seconds.
    """

    address: str
    ask: Ask = ask_for_status
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _known: list[str] = field(default_factory=list)  # addresses of live peers
    _before: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    _steps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # one or two looks

    def look(self) -> Snapshot:
        """Asks everybody.

        Raises:
            Failure: nobody answers.
        """
        first, members, answers = self.ask_all()
        now_s, steps = self.clock(), int_of(first, "steps")
        rows = [
            self._row(each, answers.get(text_of(each, "peer") or ""), now_s, steps)
            for each in members
        ]
        return Snapshot(
            time_s=time.time(),
            run=text_of(first, "run") or "?",
            preset=next((p for a in answers.values() if (p := text_of(a, "preset"))), "?"),
            rows=rows,
            verdicts=next(
                (v for a in (first, *answers.values()) if (v := _maps(a, "verdicts"))), []
            ),
        )

    def ask_all(self) -> tuple[Document, list[Document], dict[str, Document]]:
        """What the first says, whom it names, and what each of these says of itself, by name.

        Raises:
            Failure: nobody answers.
        """
        first = self._first()
        members = [each for each in _maps(first, "members") if text_of(each, "peer")]
        own = text_of(first, "peer")
        self._known = [text_of(each, "address") or "" for each in members if _is_live(each)]
        others = [each for each in members if _is_live(each) and text_of(each, "peer") != own]
        names = [text_of(each, "peer") or "" for each in others]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = dict(zip(names, pool.map(self._asked, others), strict=True))
        answers = {name: answer for name, answer in asked.items() if answer is not None}
        if own is not None:
            answers[own] = first
        return first, members, answers

    def _first(self) -> Document:
        """The status of the first that answers. Raises Failure: of the one asked for."""
        try:
            return self.ask(self.address, _PEER_S if self._known else TIMEOUT_S)
        except Failure:
            for address in self._known:
                try:
                    return self.ask(address, _PEER_S)
                except Failure:
                    continue
            raise

    def _asked(self, member: Document) -> Document | None:
        address = text_of(member, "address") or ""
        if split_relayed(address) is not None:  # a relay leads members to it, and not this command
            return None
        try:
            answer = self.ask(address, _PEER_S)
        except Failure:
            return None
        # Behind one address there may be another by now.
        return answer if text_of(answer, "peer") == text_of(member, "peer") else None

    def _row(
        self, member: Document, answer: Document | None, now_s: float, steps: int | None
    ) -> PeerRow:
        """Of a peer that was not asked, such as a relayed one, what members know of it: its step,
        and so its pace, and the rounds that it has applied. Args: steps: of the whole run."""
        peer = text_of(member, "peer") or "?"
        own = answer or {}
        traffic = _map(own, "traffic") or member  # a coordinator's members have it themselves
        sent, received = int_of(traffic, "bytes_sent"), int_of(traffic, "bytes_received")
        health, phase = text_of(member, "health") or "?", text_of(own or member, "phase") or "?"
        rounds = _map(own, "rounds")
        sent_mbps, received_mbps = self._rates(peer, now_s, sent, received)
        step = int_of(own or member, "step") or 0
        pace = self._pace(peer, now_s, step)
        return PeerRow(
            peer=peer,
            answers=answer is not None,
            stage=int_of(member, "stage"),
            state=phase if health == "alive" or answer is not None else health,
            step=step,
            steps=int_of(own, "steps") if answer is not None else steps,
            rounds=int_of(rounds, "completed") if answer is not None else _applied(member),
            loss=float_of(own or member, "loss"),
            val_loss=float_of(own, "val_loss"),
            steps_per_s=float_of(own, "steps_per_s") if answer is not None else pace,
            samples_per_s=float_of(own, "samples_per_s"),
            tokens_per_s=float_of(own, "tokens_per_s"),
            rtt_ms=float_of(member, "rtt_ms"),
            path=text_of(member, "path"),
            bytes_sent=sent,
            bytes_received=received,
            sent_mbps=sent_mbps,
            received_mbps=received_mbps,
            not_taken=_not_taken(own, rounds),
        )

    def _pace(self, peer: str, now_s: float, step: int) -> float | None:
        """Steps a second, between the two latest changes of its step; None before these."""
        seen = self._steps.setdefault(peer, [])
        if not seen or step < seen[-1][1]:
            seen[:] = [(now_s, step)]
        elif step > seen[-1][1]:
            seen[:] = [seen[-1], (now_s, step)]
        if len(seen) < 2:
            return None
        (began_s, began), (ended_s, ended) = seen
        return (ended - began) / (ended_s - began_s) if ended_s > began_s else None

    def _rates(
        self, peer: str, now_s: float, sent: int | None, received: int | None
    ) -> tuple[float | None, float | None]:
        """Mbit/s each way since the last look; None at the first, and after a restart."""
        if sent is None or received is None:
            return None, None
        before, self._before[peer] = self._before.get(peer), (now_s, sent, received)
        if before is None or sent < before[1] or received < before[2] or now_s <= before[0]:
            return None, None
        took_s = now_s - before[0]
        return 8e-6 * (sent - before[1]) / took_s, 8e-6 * (received - before[2]) / took_s


def _applied(member: Document) -> int | None:
    """Rounds, by the versions of its fragments; None where they are not told."""
    versions = member.get("versions")
    counted = [each for each in versions if type(each) is int] if isinstance(versions, list) else []
    return sum(counted) if counted else None


def watch(watched: Watch, screen: "Screen", every_s: float) -> None:
    """Shows the swarm until Ctrl-C, or until it has ended.

    Raises:
        Failure: nobody answers at the beginning, or any more though the run was not over.
    """
    last, seen_s = None, watched.clock()
    try:
        while True:
            began_s = watched.clock()
            try:
                last, seen_s = watched.look(), began_s
                screen.show(last)
            except Failure as error:
                if last is None:
                    raise
                if last.over_by(began_s - seen_s):
                    return
                if began_s > seen_s + _GONE_S:
                    text = f"no peer has answered for {_GONE_S:.0f} s; last seen: {summary(last)}"
                    raise Failure(text, ExitCode.UNREACHABLE) from error
            watched.sleep(max(0.0, began_s + every_s - watched.clock()))
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until the end)
    finally:
        screen.close()


class Screen:
    """One line of JSON for each snapshot."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def show(self, snapshot: Snapshot) -> None:
        """Shows the state of things."""
        self._print(json.dumps(snapshot.plain()))

    def close(self) -> None:
        """Leaves the terminal as it was."""

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class PlainScreen(Screen):
    """One line for each snapshot, unless it would say the same again."""

    _said = ""

    def show(self, snapshot: Snapshot) -> None:
        line = summary(snapshot)
        if line != self._said:
            self._said = line
            self._print(f"{time.strftime('%H:%M:%S', time.localtime(snapshot.time_s))}  {line}")


class LiveScreen(Screen):
    """A table that is drawn over itself."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        super().__init__(console.file)
        self._live = Live(console=console, auto_refresh=False)

    def show(self, snapshot: Snapshot) -> None:
        self._live.start()
        self._live.update(table(snapshot), refresh=True)

    def close(self) -> None:
        self._live.stop()


def screen_for(console: "Console", *, as_json: bool) -> Screen:
    """JSON lines where asked for; else the table on a terminal, and plain lines elsewhere."""
    if as_json:
        return Screen(console.file)
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console) if live else PlainScreen(console.file)


def summary(snapshot: Snapshot) -> str:
    """`step 240 of 1,200  loss 2.31  4,864 tokens/s  about 3 min 20 s to go  [4 training]`."""
    of = f" of {snapshot.steps:,}" if snapshot.steps is not None else ""
    parts = [f"step {snapshot.step:,}{of}"]
    losses = [row.loss for row in snapshot.training if row.loss is not None]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.3f}")
    if snapshot.tokens_per_s is not None:
        parts.append(f"{snapshot.tokens_per_s:,.0f} tokens/s")
    if snapshot.left_s is not None:
        parts.append(f"about {duration(snapshot.left_s)} to go")
    states = [row.state for row in snapshot.rows]
    standing = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    slow = [f"slow: {verdict_words(verdict)}" for verdict in snapshot.verdicts]
    return "  ".join([*parts, f"[{standing}]", *slow])


def table(snapshot: Snapshot) -> "Table":
    """A row per peer below the summary."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    slow = "".join(f"\nslow: {verdict_words(verdict)}" for verdict in snapshot.verdicts)
    standing = summary(replace(snapshot, verdicts=()))
    title = f"run {snapshot.run[:8]}, {snapshot.preset}: {standing}{slow}"
    found = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", title_style="dim")
    staged = any(row.stage is not None for row in snapshot.rows)
    found.add_column("peer", no_wrap=True)
    found.add_column("state", no_wrap=True)
    validated = any(row.val_loss is not None for row in snapshot.rows)
    relayed = any(row.path not in (None, "direct") for row in snapshot.rows)
    names = [
        "step",
        "a second",
        "loss",
        *(["validation"] if validated else []),
        "rounds",
        "RTT",
        "sends",
        "receives",
        "sent",
        "received",
    ]
    for name in (["stage"] if staged else []) + names:
        found.add_column(name, justify="right", no_wrap=True)
    if relayed:
        found.add_column("path", overflow="fold")
    found.add_column("not taken", overflow="fold")
    for row in snapshot.rows:
        cells = [optional(row.stage, str)] if staged else []
        found.add_row(
            Text(row.peer),
            Text(row.state, style=_style(row)),
            *cells,
            f"{row.step:,}",
            _pace(row),
            optional(row.loss, lambda loss: f"{loss:.3f}"),
            *([optional(row.val_loss, lambda loss: f"{loss:.3f}")] if validated else []),
            optional(row.rounds, str),
            optional(row.rtt_ms, lambda ms: seconds(ms / 1000)),
            optional(row.sent_mbps, rate),
            optional(row.received_mbps, rate),
            optional(row.bytes_sent, size),
            optional(row.bytes_received, size),
            *([Text(row.path or "-")] if relayed else []),
            Text(", ".join(f"{reason} {count}" for reason, count in row.not_taken.items())),
        )
    return found


def _style(row: PeerRow) -> str:
    if row.state in ("training", "done"):
        return "green" if row.answers else "yellow"
    return "red" if row.state in ("dead", "lost") else "yellow"


def _pace(row: PeerRow) -> str:
    """In tokens where the task counts in them, else in samples, else in steps."""
    if row.tokens_per_s is not None:
        return f"{row.tokens_per_s:,.0f} tokens"
    if row.samples_per_s is not None:
        return f"{row.samples_per_s:,.3g} samples"
    return optional(row.steps_per_s, lambda steps: f"{steps:,.3g} steps")


def _not_taken(own: Document, rounds: Document) -> dict[str, int]:
    """Counts above 0 by reason, the swarm's own words first."""
    said = {"round failed": "failed", "step lost": "steps_lost", "late": "late"}
    counts = {reason: int_of(rounds, key) for reason, key in said.items()}
    refused = _map(own, "refused")
    counts |= {printable(str(reason)): int_of(refused, reason) for reason in refused}
    return {reason: count for reason, count in counts.items() if count}


def _map(document: Document, key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(document: Document, key: str) -> list[Document]:
    values = document.get(key)
    return (
        [each for each in values if isinstance(each, Mapping)] if isinstance(values, list) else []
    )


def _is_live(member: Document) -> bool:
    return text_of(member, "health") in _LIVE
