"""What the peers of a swarm have said of themselves so far: what the page shows.

Everything is bounded, whatever peers say and however long the run is: 128 peers, of each 512
points and 128 rounds, in all at most 30 MB. Points are thinned out, so that they span the
whole run; of rounds the latest are kept. Documents come from other machines: only fields that are
known are taken, each checked.
"""

import math
import threading
from array import array
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from protos.addresses import split_relayed
from protos.events import float_of, int_of, place_of, text_of, verdict_words
from protos.text import shown

Document = Mapping[str, Any]

MOST_PEERS = 128
MOST_LINKS = 2000
MOST_POINTS = 512  # of a peer
MOST_ROUNDS = 128  # likewise
MOST_NEWS = 200
MOST_VERDICTS = 32
_MOST_LISTED = 64  # of one list in a document
_MOST_FACTS = 12
_MOST_TEXT = 300  # characters
_RATE_S = 20.0  # over which rates are told: rounds come in bursts
_PATIENCE_S = 6.0  # before silence counts: a busy link or machine may miss a look
_LIVE = ("alive", "suspect", "lost")  # `lost` is a coordinator's word for one that may be back

# A point; all are numbers, NaN where the peer has not said.
POINT = (
    "time_s", "step", "loss", "val_loss", "tokens_per_s", "sent_mbps", "received_mbps",
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
    sent: dict[str, "_Flow"] = field(default_factory=dict)  # to each peer, on its own streams
    received: dict[str, "_Flow"] = field(default_factory=dict)
    all_sent: "_Flow" = field(default_factory=lambda: _Flow())
    all_received: "_Flow" = field(default_factory=lambda: _Flow())


class _Flow:
    """A count of bytes as it grows, and its rate over about the last twenty seconds."""

    __slots__ = ("_bytes", "_time_s", "mbps")

    def __init__(self) -> None:
        self._bytes: int | None = None
        self._time_s = 0.0
        self.mbps: float | None = None

    def add(self, count: int | None, time_s: float) -> None:
        """What has been counted by then. One that is less than before has begun again."""
        before, elapsed_s = self._bytes, time_s - self._time_s
        self._bytes, self._time_s = count, time_s
        if count is None or before is None or count < before or elapsed_s <= 0:
            self.mbps = None
            return
        now_mbps = 8e-6 * (count - before) / elapsed_s
        share = 1.0 if self.mbps is None else 1 - math.exp(-elapsed_s / _RATE_S)
        self.mbps = round((self.mbps or 0.0) * (1 - share) + now_mbps * share, 4)


class History:
    """any thread.

    Args: every_s: how often it is looked at.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._links: list[dict[str, Any]] = []
        self._verdicts: list[dict[str, Any]] = []
        self._news: deque[dict[str, Any]] = deque(maxlen=MOST_NEWS)
        self._swarm: dict[str, Any] = {}
        self._time_s = 0.0

    def add(self, look: Look) -> None:
        """Takes what the peers have just said."""
        with self._lock:
            self._time_s = look.time_s
            members = _maps(look.first, "members")[:MOST_PEERS]
            self._make_room(dict.fromkeys(map(_name, members)))
            for member in members:
                if (name := _name(member)) in self._peers:
                    self._add_peer(name, member, look.answers.get(name), look.time_s)
            self._links = _links(self._peers, look)
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

    def _make_room(self, names: Collection[str]) -> None:
        """For these peers; those that nobody names any more go first."""
        gone = [name for name in self._peers if name not in names]
        for name in names:
            if name not in self._peers and len(self._peers) >= MOST_PEERS and gone:
                del self._peers[gone.pop()]
            if len(self._peers) < MOST_PEERS:
                self._peers.setdefault(name, _Peer())

    def _add_peer(self, name: str, member: Document, own: Document | None, now_s: float) -> None:
        peer = self._peers[name]
        health = text_of(member, "health")
        waits = peer.seen_s is not None and now_s - peer.seen_s < _PATIENCE_S
        if own is None and waits and health in _LIVE:
            return
        row = _row(name, member, own, peer.row, now_s)
        if own is not None:
            peer.seen_s = now_s
            _keep_rounds(peer, own, now_s)
            others = (each for each in _maps(own, "members") if _name(each) in self._peers)
            for each in others:
                for flows, key in ((peer.sent, "sent_bytes"), (peer.received, "received_bytes")):
                    flows.setdefault(_name(each), _Flow()).add(int_of(each, key), now_s)
            peer.all_sent.add(row["bytes_sent"], now_s)
            peer.all_received.add(row["bytes_received"], now_s)
            row["sent_mbps"] = peer.all_sent.mbps
            row["received_mbps"] = peer.all_received.mbps
            _keep_point(peer, row)
        row["seen_s"] = peer.seen_s
        if (state := _told(row)) != _told(peer.row) and self._swarm:  # the first look is no news
            self._tell(now_s, name, state)
        if (failed := row["failed"] - peer.row.get("failed", row["failed"])) > 0:
            self._tell(now_s, name, f"{failed} of its rounds failed")
        peer.row = row

    def _tell(self, now_s: float, peer: str, text: str) -> None:
        self._news.append({"time_s": now_s, "peer": peer, "text": text})


def _told(row: Document) -> str:
    """The state as news: a wait is none, every round brings one."""
    state: str = row.get("state", "")
    if row.get("live") and not row["answers"] and not row["relayed"]:
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
        "relayed": split_relayed(text_of(member, "address") or "") is not None,
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
    }


def _keep_point(peer: _Peer, row: Document) -> None:
    peer.points.extend(math.nan if (v := row.get(key)) is None else v for key in POINT)
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
        if known is not None and (known["resumed_s"] is not None or known["failed"]):
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


def _links(peers: Mapping[str, _Peer], look: Look) -> list[dict[str, Any]]:
    """Pairs of which either tells something, the busiest first. What goes from a to b is what a
    sends on its own streams, and what b receives on its own."""
    told: dict[tuple[str, str], dict[str, Any]] = {}
    relays = _relays(look.first)
    for name, own in look.answers.items():
        for member in _maps(own, "members")[:MOST_PEERS]:
            other = _name(member)
            if name not in peers or other not in peers or other == name:
                continue
            low, high = min(name, other), max(name, other)
            ways = (relays.get(peer) for peer in (low, high))
            via = next((way for way in ways if way not in (None, low, high)), None)
            new = {"a": low, "b": high, "rtt_ms": None, "via": via, "mbps": [None, None]}
            link = told.setdefault((low, high), new)
            rtt_ms = float_of(member, "rtt_ms")
            link["rtt_ms"] = link["rtt_ms"] if rtt_ms is None else rtt_ms
            flows = peers[name].sent.get(other), peers[name].received.get(other)
            for way, flow in enumerate(flows if name == low else reversed(flows)):
                if flow is not None and flow.mbps is not None:
                    link["mbps"][way] = round((link["mbps"][way] or 0.0) + flow.mbps, 4)
    return sorted(told.values(), key=lambda link: -sum(filter(None, link["mbps"])))[:MOST_LINKS]


def _relays(first: Document) -> dict[str, str]:
    """The relay of each peer that others cannot dial: its address is PEER@RELAY,ANOTHER. By name
    where the relay is a member, as it is unless it has just died."""
    members = _maps(first, "members")
    names = {text_of(member, "address"): _name(member) for member in members}
    found = {}
    for member in members:
        if (way := split_relayed(text_of(member, "address") or "")) is not None:
            relay = way[1][0]
            found[_name(member)] = names.get(relay, shown(relay))
    return found


def _later(points: "array[float]", time_s: float) -> list[list[float | None]]:
    width = len(POINT)
    rows = (points[start : start + width] for start in range(0, len(points), width))
    return [[None if math.isnan(v) else v for v in row] for row in rows if row[0] > time_s]


def _verdicts(look: Look) -> list[dict[str, Any]]:
    """The faults that peers have located, each once, by the word that tells the highest cost; with
    how many tell of it, for one peer alone may be wrong."""
    found: dict[tuple[str, ...], tuple[float, Document]] = {}
    tellers: Counter[tuple[str, ...]] = Counter()
    for own in look.answers.values() or (look.first,):
        said = _maps(own, "verdicts")[:_MOST_LISTED]
        tellers.update({place_of(verdict) for verdict in said})
        for verdict in said:
            place, cost = place_of(verdict), float_of(verdict, "cost") or 0.0
            if place not in found or cost > found[place][0]:
                found[place] = cost, verdict
    ranked = sorted(found.items(), key=lambda each: (-tellers[each[0]], -each[1][0]))
    return [
        {
            "kind": shown(place[0]),
            "peer": shown(place[1]),
            "to": shown(place[2]),
            "text": shown(verdict_words(verdict), _MOST_TEXT),
            "by": tellers[place],
        }
        for place, (_, verdict) in ranked[:MOST_VERDICTS]
    ]


def _counts(document: Document, key: str) -> dict[str, int]:
    """Above 0, by reason or peer."""
    counts = _map(document, key)
    found = {shown(str(name)): int_of(counts, name) or 0 for name in list(counts)[:_MOST_FACTS]}
    return {name: count for name, count in found.items() if count}


def _name(member: Document) -> str:
    name = member.get("peer")
    return _shown_name(name) if isinstance(name, str) else "?"


@lru_cache(4 * MOST_PEERS)
def _shown_name(name: str) -> str:
    return shown(name) or "?"


def _map(document: Document, key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(document: Document, key: str) -> list[Document]:
    values = document.get(key)
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list) else []
