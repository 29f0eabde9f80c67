"""A history of what a swarm's peers say of themselves, for the page and `murmur status`.

Everything is bounded, whatever peers say and however long the run is: 128 peers, of each 512 points
and 128 rounds, in all at most 30 MB. Points are thinned out, so that they span the whole run; of
rounds the latest are kept. Of documents, known fields are taken, each checked.
"""

import math
import threading
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from murmuration.protos.addresses import public_address
from murmuration.protos.events import costliest, float_of, int_of, place_of, text_of, verdict_words
from murmuration.protos.figures import shown
from murmuration.worker.views import summary as views
from murmuration.worker.views.summary import Document, PeerSummary, SwarmSummary, maps_of

MOST_PEERS = 128
MOST_LINKS = 2000
MOST_POINTS = 512  # of a peer
MOST_ROUNDS = 128  # likewise
MOST_NEWS = 200
MOST_VERDICTS = 32
_MOST_LISTED = 64  # of one list in a document
_MOST_TEXT = 300  # characters
_RATE_S = 20.0  # over which rates are told: rounds come in bursts
_PATIENCE_S = 6.0  # before silence counts: a busy link or machine may miss a look
_RECENT_S = 120.0  # over which it is told who waited for whom
_MOST_STALL_S = 1e6
# What a peer has said stays where it does not answer any more.
_KEPT = (
    "steps", "loss", "bytes_sent", "bytes_received", "rounds_completed", "rounds_failed", "late",
    "steps_lost",
)  # fmt: skip

# A point; all are numbers, NaN where the peer has not said.
POINT = (
    "time_s", "step", "loss", "val_loss", "tokens_per_s", "sent_mbps", "received_mbps",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """The swarm at one moment."""

    time_s: float  # since 1970
    first: Document  # the document that says which peers there are
    answers: Mapping[str, Document]  # by name, those of the peers that have answered


class _Flow:
    __slots__ = ("_count", "_time_s", "per_s")

    def __init__(self) -> None:
        self._count: int | None = None
        self._time_s = 0.0
        self.per_s: float | None = None

    def add(self, count: int | None, time_s: float) -> None:
        """Takes a count of that moment. One that is less than before has begun again."""
        before, elapsed_s = self._count, time_s - self._time_s
        self._count, self._time_s = count, time_s
        if count is None or before is None or count < before or elapsed_s <= 0:
            self.per_s = None
            return
        now_per_s = (count - before) / elapsed_s
        share = 1.0 if self.per_s is None else 1 - math.exp(-elapsed_s / _RATE_S)
        self.per_s = (self.per_s or 0.0) * (1 - share) + now_per_s * share

    @property
    def mbps(self) -> float | None:
        return None if self.per_s is None else round(8e-6 * self.per_s, 4)


@dataclass
class _Peer:
    summary: PeerSummary
    points: "array[float]" = field(default_factory=lambda: array("d"))  # rows of POINT
    rounds: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    # To and from each peer, on its own streams; of all together under no name.
    sent: defaultdict[str, _Flow] = field(default_factory=lambda: defaultdict(_Flow))
    received: defaultdict[str, _Flow] = field(default_factory=lambda: defaultdict(_Flow))
    steps: _Flow = field(default_factory=_Flow)

    def later(self, time_s: float) -> list[list[float | None]]:
        width, points = len(POINT), self.points
        rows = (points[start : start + width] for start in range(0, len(points), width))
        return [[None if math.isnan(v) else v for v in row] for row in rows if row[0] > time_s]


class History:
    """Holds what all peers have said. any thread. Args: every_s: how often it is looked at."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._links: list[dict[str, Any]] = []
        self._verdicts: list[dict[str, Any]] = []
        self._news: deque[dict[str, Any]] = deque(maxlen=MOST_NEWS)
        self._swarm: dict[str, Any] = {}
        self._waits: dict[str, Any] = {}
        self._time_s = 0.0

    def add(self, look: Look) -> None:
        with self._lock:
            self._time_s = look.time_s
            listed = maps_of(look.first, "members")[:MOST_PEERS]
            members = {views.name_of(each): each for each in listed}
            told = {name: str(each.get("address")) for name, each in members.items()}
            addresses = {public_address(address): name for name, address in told.items()}
            gone = [name for name in self._peers if name not in members]  # these make room
            for name in members:
                if name not in self._peers and len(self._peers) >= MOST_PEERS and gone:
                    del self._peers[gone.pop()]
                if len(self._peers) < MOST_PEERS:
                    self._peers.setdefault(name, _Peer(PeerSummary(name)))
            for name, member in members.items():
                if name in self._peers:
                    self._add_peer(name, member, look.answers.get(name), addresses)
            self._count_waits()
            self._links, self._verdicts = _links(self._peers, look), _verdicts(look)
            presets = (text_of(each, "preset") for each in look.answers.values())
            self._swarm = {
                "run": shown(text_of(look.first, "run") or "?"),
                "preset": shown(next(filter(None, presets), "?")),
                "seen_by": shown(text_of(look.first, "peer") or "the coordinator"),
                "encrypted": look.first.get("encrypted") is True,
            }

    def summary(self) -> SwarmSummary:
        with self._lock:
            return SwarmSummary(
                peers=[peer.summary for _, peer in sorted(self._peers.items())],
                run=self._swarm.get("run", ""),
                preset=self._swarm.get("preset", ""),
                verdicts=[verdict["text"] for verdict in self._verdicts],
            )

    def since(self, time_s: float) -> dict[str, Any]:
        """Plain values: how it is now, and the points and rounds later than this time."""
        with self._lock:
            swarm, peers = self.summary(), sorted(self._peers.items())
            heads, rows = swarm.table(leave_out=("address", "validation", "RTT"))  # which are drawn
            progress = {"step": swarm.step, "steps": swarm.steps, "left_s": swarm.left_s}
            return {
                "time_s": self._time_s,
                "every_s": self._every_s,
                "swarm": self._swarm | progress,
                "facts": swarm.facts(),
                "table": {"heads": heads, "rows": rows},
                "peers": [asdict(each.summary) for _, each in peers],
                "waits": self._waits,
                "links": self._links,
                "verdicts": self._verdicts,
                "news": [each for each in self._news if each["time_s"] > time_s],
                "point": POINT,
                "points": {name: each.later(time_s) for name, each in peers},
                "rounds": {
                    name: [r for r in each.rounds.values() if r["told_s"] > time_s]
                    for name, each in peers
                },
            }

    def _add_peer(
        self, name: str, member: Document, own: Document | None, addresses: Mapping[str, str]
    ) -> None:
        peer, now_s = self._peers[name], self._time_s
        before, seen_s = peer.summary, peer.summary.seen_s
        patient = own is None and seen_s is not None and now_s - seen_s < _PATIENCE_S
        if patient and text_of(member, "health") in views.LIVE:
            return
        after = peer.summary = views.summary_of(member, own, addresses)
        peer.steps.add(after.step, now_s)
        if own is None:
            after.seen_s = seen_s
            after.steps_per_s = peer.steps.per_s if after.live else None
            for key in _KEPT:
                if getattr(after, key) is None:
                    setattr(after, key, getattr(before, key))
        else:
            after.seen_s = now_s
            _keep_rounds(peer, own, now_s)
            for each in maps_of(own, "members"):
                if (other := views.name_of(each)) in self._peers:
                    peer.sent[other].add(int_of(each, "sent_bytes"), now_s)
                    peer.received[other].add(int_of(each, "received_bytes"), now_s)
            peer.sent[""].add(after.bytes_sent, now_s)
            peer.received[""].add(after.bytes_received, now_s)
            after.sent_mbps, after.received_mbps = peer.sent[""].mbps, peer.received[""].mbps
            values = (now_s, *(getattr(after, key) for key in POINT[1:]))
            peer.points.extend(math.nan if value is None else value for value in values)
            if len(peer.points) > MOST_POINTS * len(POINT):  # every other one, but for the last
                starts = range(0, len(peer.points), 2 * len(POINT))
                rows = (peer.points[start : start + len(POINT)] for start in starts)
                peer.points = array("d", chain.from_iterable(rows))
        if (state := _told(after)) != _told(before) and self._swarm:  # the first look is no news
            self._tell(name, state)
        failed = after.rounds_failed or 0
        if before.rounds_failed is not None and failed > before.rounds_failed:
            self._tell(name, f"{failed - before.rounds_failed} of its rounds failed")

    def _tell(self, peer: str, text: str) -> None:
        self._news.append({"time_s": self._time_s, "peer": peer, "text": text})

    def _count_waits(self) -> None:
        since_s = self._time_s - _RECENT_S
        by_peer: defaultdict[str, float] = defaultdict(float)
        waited_s = watched_s = 0.0
        for name, peer in self._peers.items():
            times = [time_s for time_s in peer.points[:: len(POINT)] if time_s > since_s]
            watched_s += times[-1] - times[0] if times else 0.0
            for each in peer.rounds.values():
                if each["waited_for"] and (each["resumed_s"] or 0.0) >= since_s:
                    waited_s += each["stall_s"]
                    if each["waited_for"] != name:
                        by_peer[each["waited_for"]] += each["stall_s"]
        for name, peer in self._peers.items():
            peer.summary.waited_for_s = by_peer.get(name)
        share = waited_s / watched_s if watched_s > 0 else 0.0
        self._waits = {"by_peer": dict(by_peer), "share": share}


def _told(summary: PeerSummary) -> str:
    silent = summary.live and not summary.answers and not summary.relays
    return "does not answer" if silent else summary.state


def _keep_rounds(peer: _Peer, own: Document, now_s: float) -> None:
    """A round is told of until it is over, and then once more: times come from ages."""
    for said in maps_of(own, "recent_rounds")[-_MOST_LISTED:]:
        fragment, round_ = int_of(said, "fragment"), int_of(said, "round")
        began_s, ended_s, resumed_s = (
            None if (ago := float_of(said, f"{what}_s_ago")) is None else round(now_s - ago, 3)
            for what in ("began", "ended", "resumed")
        )
        if fragment is None or round_ is None or began_s is None:
            continue
        known = peer.rounds.get((fragment, round_))
        if known is not None and (known["resumed_s"] is not None or known["failed"]):
            continue
        peer.rounds[fragment, round_] = {
            "fragment": fragment,
            "round": round_,
            "began_s": began_s,
            "ended_s": ended_s,
            "failed": said.get("failed") is True,
            "waited_for": shown(text_of(said, "waited_for") or ""),
            "stall_s": min(float_of(said, "stall_s") or 0.0, _MOST_STALL_S),
            "resumed_s": resumed_s,
            "told_s": now_s,
        }
    while len(peer.rounds) > MOST_ROUNDS:
        peer.rounds.pop(next(iter(peer.rounds)))


def _links(peers: Mapping[str, _Peer], look: Look) -> list[dict[str, Any]]:
    """The busiest first. From a to b goes what a sends, and b receives, on its own streams."""
    told: dict[tuple[str, str], dict[str, Any]] = {}
    for name, own in look.answers.items():
        for member in maps_of(own, "members")[:MOST_PEERS]:
            other = views.name_of(member)
            if name not in peers or other not in peers or other == name:
                continue
            low, high = min(name, other), max(name, other)
            ways = (relay for peer in (low, high) for relay in peers[peer].summary.relays[:1])
            via = next((relay for relay in ways if relay not in (low, high)), None)
            new = {"a": low, "b": high, "rtt_ms": None, "via": via, "mbps": [None, None]}
            link = told.setdefault((low, high), new)
            if (rtt_ms := float_of(member, "rtt_ms")) is not None:
                link["rtt_ms"] = rtt_ms
            flows = peers[name].sent.get(other), peers[name].received.get(other)
            for way, flow in enumerate(flows if name == low else reversed(flows)):
                if flow is not None and flow.mbps is not None:
                    link["mbps"][way] = round((link["mbps"][way] or 0.0) + flow.mbps, 4)
    return sorted(told.values(), key=lambda link: -sum(filter(None, link["mbps"])))[:MOST_LINKS]


def _verdicts(look: Look) -> list[dict[str, Any]]:
    """Sorts them by how many peers tell of each: one alone may be wrong."""
    found = [maps_of(own, "verdicts")[:_MOST_LISTED] for own in look.answers.values()]
    tellers = Counter(place for said in found for place in {place_of(each) for each in said})
    ranked = costliest(found or [maps_of(look.first, "verdicts")[:_MOST_LISTED]])
    ranked.sort(key=lambda verdict: -tellers[place_of(verdict)])
    return [
        {
            "kind": shown(kind),
            "peer": shown(peer),
            "to": shown(to),
            "text": shown(verdict_words(verdict), _MOST_TEXT),
            "by": tellers[kind, peer, to],
            "believed": 2 * tellers[kind, peer, to] > len(look.answers),
        }
        for verdict in ranked[:MOST_VERDICTS]
        for kind, peer, to in [place_of(verdict)]
    ]
