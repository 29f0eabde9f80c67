"""What the peers of a swarm have said of themselves so far: what the page shows.

Everything is bounded, whatever peers say and however long the run is: 256 peers, of each 1,024
points and 256 rounds, in all about 100 kB a peer. Points are thinned out, so that they span the
whole run; of rounds the latest are kept. Documents come from other machines: only fields that are
known are taken, each checked.
"""

import math
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from protos.events import float_of, int_of, place_of, text_of, verdict_words
from protos.text import shown

Document = Mapping[str, Any]

MOST_PEERS = 256
MOST_POINTS = 1024  # of a peer
MOST_ROUNDS = 256  # likewise
MOST_NEWS = 200
MOST_VERDICTS = 32
_MOST_LISTED = 64  # of one list in a document
_MOST_FACTS = 12
_LIVE = ("alive", "suspect", "lost")  # `lost` is a coordinator's word for one that may be back

# A point; all are numbers, NaN where the peer has not said.
POINT = (
    "time_s", "step", "loss", "val_loss", "tokens_per_s", "sent_mbps", "received_mbps", "waits",
)  # fmt: skip
_NUMBERS = (
    "val_loss", "learning_rate", "gradient_norm", "steps_per_s", "samples_per_s", "tokens_per_s",
    "waiting_s",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """The swarm at one moment.

    Args:
        time_s: seconds since 1970, by the clock of this machine.
        first: the document of whoever says which peers there are.
        answers: those of the peers that have answered, by name.
    """

    time_s: float
    first: Document
    answers: Mapping[str, Document]


@dataclass
class _Peer:
    """What is kept of one peer. Args: seen_s: when it last answered."""

    points: "array[float]" = field(default_factory=lambda: array("d"))  # rows of POINT
    rounds: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    seen_s: float | None = None
    sent: dict[str, int] = field(default_factory=dict)  # bytes to each peer, on its own streams
    received: dict[str, int] = field(default_factory=dict)


class History:
    """any thread.

    Args: every_s: how often it is looked at.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._links: list[dict[str, Any]] = []
        self._verdicts: list[str] = []
        self._news: deque[dict[str, Any]] = deque(maxlen=MOST_NEWS)
        self._swarm: dict[str, Any] = {}
        self._time_s = 0.0

    def add(self, look: Look) -> None:
        """Takes what the peers have just said."""
        with self._lock:
            elapsed_s = look.time_s - self._time_s if self._time_s else math.nan
            self._time_s = look.time_s
            members = _maps(look.first, "members")[:MOST_PEERS]
            before = {name: (each.sent, each.received) for name, each in self._peers.items()}
            for member in members:
                name = _name(member)
                if name in self._peers or len(self._peers) < MOST_PEERS:
                    self._add_peer(name, member, look.answers.get(name), look.time_s)
            self._links = list(_links(self._peers, before, look, elapsed_s))
            self._verdicts = _verdicts(look)
            preset = next((p for a in look.answers.values() if (p := text_of(a, "preset"))), "")
            self._swarm = {
                "run": shown(text_of(look.first, "run") or "?"),
                "preset": shown(preset or "?"),
                "seen_by": shown(text_of(look.first, "peer") or "the coordinator"),
                "encrypted": look.first.get("encrypted") is True,
            }

    def since(self, time_s: float) -> dict[str, Any]:
        """Plain values: how it is now, and the points and rounds later than this time."""
        with self._lock:
            peers = self._peers.items()
            return {
                "time_s": self._time_s,
                "every_s": self._every_s,
                "swarm": self._swarm,
                "peers": [each.row for _, each in sorted(peers)],
                "links": self._links,
                "verdicts": self._verdicts,
                "news": [each for each in self._news if each["time_s"] > time_s],
                "point": POINT,
                "points": {name: _later(each.points, time_s) for name, each in peers},
                "rounds": {
                    name: [r for r in each.rounds.values() if r["told_s"] > time_s]
                    for name, each in peers
                },
            }

    # --------------------------------------------------------------------------------- inside

    def _add_peer(self, name: str, member: Document, own: Document | None, now_s: float) -> None:
        peer = self._peers.setdefault(name, _Peer())
        row = _row(name, member, own, peer.row, now_s)
        if own is not None:
            peer.seen_s = now_s
            _keep_rounds(peer, own, now_s)
            peer.sent = {_name(m): int_of(m, "sent_bytes") or 0 for m in _maps(own, "members")}
            peer.received = {
                _name(m): int_of(m, "received_bytes") or 0 for m in _maps(own, "members")
            }
            row["sent_mbps"] = _rate(row, peer.row, "bytes_sent")
            row["received_mbps"] = _rate(row, peer.row, "bytes_received")
            _keep_point(peer, row)
        row["seen_s"] = peer.seen_s
        if (state := _told(row)) != _told(peer.row):
            self._tell(now_s, name, state)
        if (failed := row["failed"] - peer.row.get("failed", row["failed"])) > 0:
            self._tell(now_s, name, f"{failed} of its rounds failed")
        peer.row = row

    def _tell(self, now_s: float, peer: str, text: str) -> None:
        self._news.append({"time_s": now_s, "peer": peer, "text": text})


def _told(row: Document) -> str:
    """The state as news: a wait is none, every round brings one."""
    state: str = row.get("state", "")
    if row.get("live") and not row["answers"]:
        return "does not answer"
    return "training" if state == "waiting" else state


def _row(
    name: str, member: Document, own: Document | None, before: Document, now_s: float
) -> dict[str, Any]:
    """The peer by its own word where it has answered, else as another knows it."""
    said = own or {}
    traffic = _map(said, "traffic") or member
    rounds = _map(said, "rounds")
    health = shown(text_of(member, "health") or "?")
    phase = shown(text_of(own or member, "phase") or "?")
    waits = float_of(said, "waiting_s") is not None
    state = phase if own is not None or health == "alive" else health
    kept = before if own is None else {}  # what it said last

    def told(value: float | None, key: str, default: float | None = None) -> float | None:
        return value if value is not None else kept.get(key, default)

    return {
        "peer": name,
        "address": shown(text_of(member, "address") or ""),
        "time_s": now_s,
        "answers": own is not None,
        "health": health,
        "state": "waiting" if waits and state == "training" else state,
        "live": own is not None or health in _LIVE,
        "stage": int_of(member, "stage"),
        "step": int_of(own or member, "step") or 0,
        "steps": told(int_of(said, "steps"), "steps"),
        "loss": told(float_of(own or member, "loss"), "loss"),
        **{key: float_of(said, key) for key in _NUMBERS},
        "bytes_sent": told(int_of(traffic, "bytes_sent"), "bytes_sent"),
        "bytes_received": told(int_of(traffic, "bytes_received"), "bytes_received"),
        "completed": told(int_of(rounds, "completed"), "completed"),
        "failed": told(int_of(rounds, "failed"), "failed", 0),
        "late": told(int_of(rounds, "late"), "late", 0),
        "dropped": _counts(said, "refused"),
        "quarantined": _counts(said, "quarantine"),
        "accusations": _counts(said, "accusations"),
    }


def _keep_point(peer: _Peer, row: Document) -> None:
    values = {**row, "waits": float(row["state"] == "waiting")}
    peer.points.extend(math.nan if (v := values.get(key)) is None else v for key in POINT)
    width = len(POINT)
    if len(peer.points) > MOST_POINTS * width:  # every other one, but for the last
        kept = array("d")
        for start in range(0, len(peer.points), 2 * width):
            kept.extend(peer.points[start : start + width])
        peer.points = kept


def _keep_rounds(peer: _Peer, own: Document, now_s: float) -> None:
    """A round is told of until it is over, and then once more: times come from ages."""
    for said in _maps(own, "recent_rounds")[-_MOST_LISTED:]:
        fragment, round_ = int_of(said, "fragment"), int_of(said, "round")
        began_s_ago = float_of(said, "began_s_ago")
        if fragment is None or round_ is None or began_s_ago is None:
            continue
        known = peer.rounds.get((fragment, round_))
        if known is not None and known["resumed_s"] is not None:
            continue
        ended, resumed = float_of(said, "ended_s_ago"), float_of(said, "resumed_s_ago")
        peer.rounds[fragment, round_] = {
            "fragment": fragment,
            "round": round_,
            "began_s": round(now_s - began_s_ago, 3),
            "ended_s": None if ended is None else round(now_s - ended, 3),
            "failed": said.get("failed") is True,
            "waited_for": shown(text_of(said, "waited_for") or ""),
            "stall_s": float_of(said, "stall_s") or 0.0,
            "resumed_s": None if resumed is None else round(now_s - resumed, 3),
            "told_s": now_s,
        }
    while len(peer.rounds) > MOST_ROUNDS:
        peer.rounds.pop(next(iter(peer.rounds)))


def _links(
    peers: Mapping[str, _Peer],
    before: Mapping[str, tuple[dict[str, int], dict[str, int]]],
    look: Look,
    elapsed_s: float,
) -> Iterator[dict[str, Any]]:
    """Each pair of which either tells something. What went from a to b is what a has sent on its
    own streams, and what b has received on its own."""
    told: dict[tuple[str, str], dict[str, Any]] = {}
    for name, own in look.answers.items():
        for member in _maps(own, "members")[:MOST_PEERS]:
            other = _name(member)
            if name not in peers or other not in peers or other == name:
                continue
            low, high = min(name, other), max(name, other)
            link = told.setdefault(
                (low, high), {"a": low, "b": high, "rtt_ms": None, "ways": [0, 0], "via": None}
            )
            rtt_ms, via = float_of(member, "rtt_ms"), text_of(member, "relay")
            link["rtt_ms"] = link["rtt_ms"] if rtt_ms is None else rtt_ms
            link["via"] = shown(via) if via else link["via"]
            sent, received = before.get(name, ({}, {}))
            forth = _growth(peers[name].sent, sent, other)
            back = _growth(peers[name].received, received, other)
            link["ways"][name != low] += forth
            link["ways"][name == low] += back
    for link in told.values():
        ways = link.pop("ways")
        known = elapsed_s > 0  # not at the first look
        link["mbps"] = [round(8e-6 * way / elapsed_s, 4) if known else None for way in ways]
        yield link


def _growth(now: Mapping[str, int], before: Mapping[str, int], peer: str) -> int:
    """Bytes since the last look; none where there was none, or after a restart."""
    return max(0, now.get(peer, 0) - before.get(peer, now.get(peer, 0)))


def _rate(row: Document, before: Document, key: str) -> float | None:
    """Mbit/s since the peer's last answer."""
    now, was, since_s = int_of(row, key), int_of(before, key), float_of(before, "seen_s")
    if now is None or was is None or since_s is None or now < was or row["time_s"] <= since_s:
        return None
    elapsed_s: float = row["time_s"] - since_s
    return round(8e-6 * (now - was) / elapsed_s, 4)


def _later(points: "array[float]", time_s: float) -> list[list[float | None]]:
    width = len(POINT)
    rows = (points[start : start + width] for start in range(0, len(points), width))
    return [[None if math.isnan(v) else v for v in row] for row in rows if row[0] > time_s]


def _verdicts(look: Look) -> list[str]:
    """What peers have found to slow the rounds, each told once."""
    documents = (look.first, *look.answers.values())
    said = [v for own in documents for v in _maps(own, "verdicts")[:_MOST_LISTED]]
    words = {
        place_of(v): shown(verdict_words(v), 300) for v in reversed(said) if text_of(v, "kind")
    }
    return list(words.values())[::-1][:MOST_VERDICTS]


def _counts(document: Document, key: str) -> dict[str, int]:
    """Above 0, by reason or peer."""
    counts = _map(document, key)
    found = {shown(str(name)): int_of(counts, name) or 0 for name in list(counts)[:_MOST_FACTS]}
    return {name: count for name, count in found.items() if count}


def _name(member: Document) -> str:
    return shown(text_of(member, "peer") or "?")


def _map(document: Document, key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(document: Document, key: str) -> list[Document]:
    values = document.get(key)
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list) else []
