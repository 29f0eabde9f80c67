"""Each peer of a run in short, and the figures and the table that every view draws of them."""

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from murmuration.protos.addresses import split_relayed
from murmuration.protos.events import float_of, int_of, text_of
from murmuration.protos.figures import duration, rate, seconds, shown, size

Document = Mapping[str, Any]
T = TypeVar("T")

LIVE = ("alive", "suspect", "lost")  # `lost` is a coordinator's word for one that may be back
_OWN_NUMBERS = (
    "val_loss", "learning_rate", "gradient_norm", "steps_per_s", "samples_per_s", "tokens_per_s",
    "mfu", "waiting_s",
)  # fmt: skip
_MAX_FACTS = 12
_STATES = ("state", "end")  # columns
_WRAPPED = ("stage", "not taken")
_WIDEST = 10_000


@dataclass
class PeerSummary:
    """One peer, by its own word where it has answered, else as another knows it; None: unknown."""

    peer: str
    address: str = ""
    state: str = "?"  # its phase while it lives, else how it went
    health: str = "?"
    answers: bool = False
    live: bool = False
    stage: int | None = None
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    device_memory_bytes: int | None = None
    waiting_s: float | None = None  # how long its training has stood still by now
    rounds_completed: int | None = None
    rounds_failed: int | None = None
    late: int | None = None
    steps_lost: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    sent_mbps: float | None = None
    received_mbps: float | None = None
    rtt_ms: float | None = None  # from the peer that named it
    # How long the others stood still for it in the last two minutes.
    waited_for_s: float | None = None
    seen_s: float | None = None  # when it last answered, in seconds since 1970
    relays: list[str] = field(default_factory=list)  # the peers that others reach it through
    # Messages that it did not take, by reason.
    refused: dict[str, int] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)  # and by sender


def summary_of(
    member: Document, own: Document | None, names: Mapping[str, str] | None = None
) -> PeerSummary:
    """Sums up a peer: `member`, as another has it in its status document, and its own document, if
    it has answered. Args: names: of peers, by address."""
    said: Document = {} if own is None else own
    either: Document = member if own is None else own
    traffic, rounds = map_of(said, "traffic"), map_of(said, "rounds")
    if not rounds:  # of a peer that does not answer: by the versions of its fragments
        versions = member.get("versions")
        counted = [v for v in versions if type(v) is int] if isinstance(versions, list) else []
        rounds = {"completed": sum(counted) if counted else None}
    health, phase = shown(text_of(member, "health") or "?"), shown(text_of(either, "phase") or "?")
    return PeerSummary(
        peer=name_of(member),
        address=shown(text_of(member, "address") or ""),
        state=phase if own is not None or health == "alive" else health,
        health=health,
        answers=own is not None,
        live=own is not None or health in LIVE,
        stage=int_of(member, "stage"),
        step=int_of(either, "step") or 0,
        steps=int_of(said, "steps"),
        loss=float_of(either, "loss"),
        rounds_completed=int_of(rounds, "completed"),
        rounds_failed=int_of(rounds, "failed"),
        late=int_of(rounds, "late"),
        steps_lost=int_of(rounds, "steps_lost"),
        device_memory_bytes=int_of(said, "device_memory_bytes"),
        bytes_sent=int_of(traffic, "bytes_sent"),
        bytes_received=int_of(traffic, "bytes_received"),
        rtt_ms=float_of(member, "rtt_ms"),
        relays=[shown(each) for each in relays_of(member.get("address"), names or {})],
        refused=_counts(said, "refused"),
        quarantine=_counts(said, "quarantine"),
        **{key: float_of(said, key) for key in _OWN_NUMBERS},
    )


def relays_of(address: object, names: Mapping[str, str]) -> list[str]:
    """The peers through which an address is reached, by name where they are members."""
    way = split_relayed(address) if isinstance(address, str) else None
    return [] if way is None else [names.get(relay, relay) for relay in way[1]]


def name_of(member: Document) -> str:
    name = member.get("peer")
    return shown(name) or "?" if isinstance(name, str) else "?"


def map_of(document: Document, key: str) -> Document:
    """A map in a document of another process, if there is one."""
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def maps_of(document: Document, key: str) -> list[Document]:
    values = document.get(key)
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list) else []


def _counts(document: Document, key: str) -> dict[str, int]:
    counts = map_of(document, key)
    found = {shown(str(name)): int_of(counts, name) or 0 for name in list(counts)[:_MAX_FACTS]}
    return {name: count for name, count in found.items() if count}


@dataclass(frozen=True, kw_only=True)
class SwarmSummary:
    """All peers at one moment. Args: verdicts: the faults that they have located, in words."""

    peers: Sequence[PeerSummary]
    run: str = ""
    preset: str = ""
    verdicts: Sequence[str] = ()

    @property
    def working(self) -> list[PeerSummary]:
        return [peer for peer in self.peers if peer.state == "training"]

    @property
    def step(self) -> int:
        """The step of the peer at work that is least far; else of the one that came furthest."""
        if self.working:
            return min(peer.step for peer in self.working)
        return max((peer.step for peer in self.peers), default=0)

    @property
    def steps(self) -> int | None:
        return max((peer.steps for peer in self.peers if peer.steps), default=None)

    @property
    def left_s(self) -> float | None:
        """How long the slowest peer still needs, at the pace of now."""
        if (steps := self.steps) is None:
            return None
        paces = [(peer.step, peer.steps_per_s) for peer in self.working]
        left = [max(0, steps - step) / pace for step, pace in paces if pace]
        return max(filter(math.isfinite, left), default=None)

    def facts(self) -> list[tuple[str, str]]:
        states = Counter(peer.state for peer in self.peers)
        facts = [("peers", ", ".join(f"{count} {state}" for state, count in states.items()))]
        if self.step or self.steps:
            of = f" of {self.steps:,}" if self.steps else ""
            facts.append(("step", f"{self.step:,}{of}"))
        if losses := [peer.loss for peer in self.working if peer.loss is not None]:
            facts.append(("loss", f"{sum(losses) / len(losses):.3f}"))
        if validated := [(p.step, p.val_loss) for p in self.peers if p.val_loss is not None]:
            facts.append(("validation loss", f"{max(validated)[1]:.3f}"))
        if rounds := max((peer.rounds_completed or 0 for peer in self.peers), default=0):
            facts.append(("rounds", f"{rounds:,}"))
        if paces := [p.tokens_per_s for p in self.working if p.tokens_per_s is not None]:
            facts.append(("tokens a second", f"{sum(paces):,.0f}"))
        if sent := sum(peer.bytes_sent or 0 for peer in self.peers):
            facts.append(("sent by all", size(sent)))
        if (left_s := self.left_s) is not None:
            facts.append(("to go", f"about {duration(left_s)}"))
        return facts

    def line(self) -> str:
        """`peers 4 training  step 240 of 1,200  loss 2.310  to go about 3 min 20 s`."""
        parts = [f"{name} {value}" for name, value in self.facts()]
        return "  ".join([*parts, *(f"slow: {verdict}" for verdict in self.verdicts)])

    def table(self, *, leave_out: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
        columns = {head: cell for head, cell in _COLUMNS.items() if head not in leave_out}
        return known_columns(columns, self.peers)


def known_columns(
    columns: Mapping[str, Callable[[T], str | None]], rows: Sequence[T]
) -> tuple[list[str], list[list[str]]]:
    found = {name: cells for name, of in columns.items() if any(cells := [of(row) for row in rows])}
    return list(found), [[cell or "-" for cell in row] for row in zip(*found.values(), strict=True)]


Cell = Callable[[PeerSummary], str | None]


def known(value: T | None, show: Callable[[T], str]) -> str | None:
    return None if value is None else show(value)


def _of(key: str, show: Callable[[Any], str]) -> Cell:
    return lambda peer: known(getattr(peer, key), show)


def _pace(peer: PeerSummary) -> str | None:
    if peer.tokens_per_s is not None:
        return f"{peer.tokens_per_s:,.0f} tokens"
    paces = ((peer.samples_per_s, "samples"), (peer.steps_per_s, "steps"))
    return next((f"{pace:,.3g} {noun}" for pace, noun in paces if pace is not None), None)


def _not_taken(peer: PeerSummary) -> str:
    counts = {"round failed": peer.rounds_failed, "step lost": peer.steps_lost, "late": peer.late}
    counts |= peer.refused
    counts |= {f"quarantine {sender}": count for sender, count in peer.quarantine.items()}
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count)


_COLUMNS: Mapping[str, Cell] = {
    "peer": lambda peer: peer.peer,
    "address": _of("address", str),
    "state": lambda peer: (
        "waiting" if peer.waiting_s is not None and peer.state == "training" else peer.state
    ),
    "stage": _of("stage", str),
    "step": _of("step", "{:,}".format),
    "a second": _pace,
    "MFU": _of("mfu", "{:.0%}".format),
    "device": _of("device_memory_bytes", size),
    "loss": _of("loss", "{:.3f}".format),
    "validation": _of("val_loss", "{:.3f}".format),
    "gradient norm": _of("gradient_norm", "{:.3g}".format),
    "rounds": _of("rounds_completed", "{:,}".format),
    "RTT": _of("rtt_ms", lambda ms: seconds(ms / 1000)),
    "sends": _of("sent_mbps", rate),
    "receives": _of("received_mbps", rate),
    "sent": _of("bytes_sent", size),
    "received": _of("bytes_received", size),
    "waited for": _of("waited_for_s", seconds),
    "relayed by": lambda peer: " or ".join(peer.relays),
    "not taken": _not_taken,
}


def drawn_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], align: str, title: str = "", **more: Any
) -> Table:
    """Columns below a rule, each aligned by `<` or `>`; states have colours."""
    named = {"title": Text(title) if title else None, "title_justify": "left", "title_style": "dim"}
    drawn = Table(box=box.SIMPLE_HEAD, **named | more)
    for head, side in zip(heads, align, strict=True):
        justify: Any = "left" if side == "<" else "right"
        drawn.add_column(Text(head), justify=justify, no_wrap=head not in _WRAPPED)
    for row in rows:
        cells = zip(heads, row, strict=True)
        drawn.add_row(*(Text(c, style=_style(c) if h in _STATES else "") for h, c in cells))
    return drawn


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "") -> str:
    """The same as text, as wide as it takes; by default the first column is to the left."""
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None)
    with console.capture() as said:
        console.print(drawn_table(heads, rows, align or "<" + ">" * (len(heads) - 1)))
    return "\n".join(line.rstrip() for line in said.get().splitlines())


def _style(state: str) -> str:
    bad = state.startswith(("dead", "lost", "killed", "exit", "silent"))
    return "green" if state in ("training", "done") else "red" if bad else "yellow"
