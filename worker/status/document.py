"""The answer of a worker to `murmur status`, as plain values, and those of other peers."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import public_address
from murmuration.protos.events import float_of, int_of, text_of
from murmuration.worker import wire
from murmuration.worker.config import Config
from murmuration.worker.membership import Member
from murmuration.worker.transport import Method, Traffic, Transport, TransportError
from murmuration.worker.views import ANSWER_S, ASKED_AT_ONCE
from murmuration.worker.views.summary import relays_of

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_PERIOD_S = 0.05
_SAMPLES = 20_000
_REMEMBERED = 48  # rounds: of a status that is asked for every two seconds
_MOST_ON_THE_WAY = 4096  # one of each fragment
_OF_PROGRESS = (
    "loss", "val_loss", "learning_rate", "gradient_norm", "steps_per_s", "samples", "samples_per_s",
    "tokens", "tokens_per_s", "mfu", "device_memory_bytes",
)  # fmt: skip


class LagMonitor:
    """Sleeps 50 ms again and again and keeps how much later it has woken of late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples_s, self._max_s = deque[float](maxlen=_SAMPLES), 0.0

    async def run(self) -> None:
        while True:
            before = self._clock()
            await asyncio.sleep(_PERIOD_S)
            lag_s = max(0.0, self._clock() - before - _PERIOD_S)
            self._max_s = max(self._max_s, lag_s)
            self._samples_s.append(lag_s)

    def summary_ms(self) -> dict[str, float]:
        """p50 and p99 of late, and max so far, milliseconds; zeros before the first sample."""
        ordered = sorted(self._samples_s) or [0.0]
        p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
        values_s = {"p50": p50, "p99": p99, "max": self._max_s}
        return {key: round(1000 * value_s, 3) for key, value_s in values_s.items()}


@dataclass
class _LoggedRound:
    fragment: int
    round: int
    began_s: float
    ended_s: float | None = None
    failed: bool = False
    waited_for: str = ""
    stall_s: float = 0.0
    resumed_s: float | None = None  # when the training went on after its wait


class RoundLog:
    """The rounds of this peer and how they went. io thread only. Attributes: steps_lost: inner
    steps, since something was not finite; exchange_s: of all that were completed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.done, self.failed, self.exchange_s = 0, 0, 0.0
        self.steps_lost = 0
        self._on_the_way: dict[int, _LoggedRound] = {}  # by fragment
        self._recent: deque[_LoggedRound] = deque(maxlen=_REMEMBERED)
        self._waiting_since: float | None = None

    def began(self, fragment: int, round_: int) -> None:
        if len(self._on_the_way) < _MOST_ON_THE_WAY:
            self._on_the_way[fragment] = _LoggedRound(fragment, round_, self._clock())

    def completed(self, fragment: int, round_: int, exchange_s: float, waited_for: str) -> None:
        self.done += 1
        self.exchange_s += exchange_s
        self._end(fragment, round_, waited_for).began_s = self._clock() - exchange_s

    def gave_up(self, fragment: int, round_: int, waited_for: str) -> None:
        self.failed += 1
        self._end(fragment, round_, waited_for).failed = True

    def told(self, event: Mapping[str, object]) -> None:
        """Notes what the training says: that it waits, that it goes on, for whom it has waited."""
        match event.get("event"):
            case "progress":
                waits = event.get("state") == "waiting"
                self._waiting_since = self._clock() if waits else None
            case "round":
                self._waiting_since = None
                key = int_of(event, "fragment"), int_of(event, "round")
                for each in self._recent:
                    if (each.fragment, each.round) == key:
                        each.resumed_s = self._clock()
                        each.stall_s = float_of(event, "stall_s") or 0.0
                        each.waited_for = text_of(event, "waited_for") or each.waited_for
            case "round_failed":
                self._waiting_since = None
            case "put_back":
                self.steps_lost = int_of(event, "steps_lost") or 0

    def waiting_s(self) -> float | None:
        return self._ago(self._waiting_since)

    def recent(self) -> list[dict[str, object]]:
        """The latest rounds, and those on their way. Times are ages: clocks of peers differ."""
        plain, moments = (
            ("fragment", "round", "failed", "waited_for"),
            ("began", "ended", "resumed"),
        )
        return [
            {
                **{key: getattr(each, key) for key in plain},
                **{f"{key}_s_ago": self._ago(getattr(each, f"{key}_s")) for key in moments},
                "stall_s": round(each.stall_s, 3),
            }
            for each in (*self._recent, *self._on_the_way.values())
        ]

    def _end(self, fragment: int, round_: int, waited_for: str) -> _LoggedRound:
        each = self._on_the_way.pop(fragment, None)
        if each is None or each.round != round_:
            each = _LoggedRound(fragment, round_, self._clock())
        each.ended_s, each.waited_for = self._clock(), waited_for
        self._recent.append(each)
        return each

    def _ago(self, time_s: float | None) -> float | None:
        return None if time_s is None else round(self._clock() - time_s, 3)


def status_document(
    node: "Node",
    config: Config,
    progress: Mapping[str, object],
    rounds: RoundLog,
    round_trips_s: Mapping[str, float],
    up_s: float,
) -> dict[str, object]:
    """Where this peer is, whom it knows, and what crossed the network so far. io thread only. Args:
    progress: the latest events of the training; round_trips_s: the latest by peer; up_s: how long
    this peer has been listening: traffic is counted since then."""
    context, gossip, transport = node.context, node.gossip, node.transport
    counts, me, traffic = context.counts, gossip.me, transport.traffic
    names = {public_address(member.address): member.peer for member in gossip.members}
    staged = config.stages.count > 1
    return {
        "kind": "worker",
        "peer": me.peer,
        "run": f"{context.run:016x}",
        "preset": config.preset,
        "phase": me.phase.name.lower(),
        "step": me.step,
        "steps": config.run.steps,
        **{key: progress.get(key) for key in _OF_PROGRESS},
        "up_s": round(up_s, 1),
        "members": [
            _member(member, names, round_trips_s.get(member.peer), traffic, staged=staged)
            for member in gossip.members
        ],
        "traffic": {
            "bytes_sent": traffic.sent_bytes,
            "bytes_received": traffic.received_bytes,
            "probe_bytes_sent": traffic.probe_sent_bytes,
            "probe_bytes_received": traffic.probe_received_bytes,
            "payload_bytes_sent": counts.payload_sent_bytes,
            "payload_bytes_received": counts.payload_received_bytes,
            "sent_by_method": dict(traffic.sent),
            "received_by_method": dict(traffic.received),
        },
        "rounds": {
            "completed": rounds.done,
            "failed": rounds.failed,
            "steps_lost": rounds.steps_lost,
            "late": counts.late,
            "takeovers": counts.takeovers,
            "exchange_s": round(rounds.exchange_s, 3),
        },
        "recent_rounds": rounds.recent(),
        "waiting_s": rounds.waiting_s(),
        "encrypted": transport.encrypted,
        "refused": dict(counts.refused),
        "quarantine": dict(counts.left_out),
        "accusations": {  # how often a peer says of another, which lives, that it has ended
            f"{accuser} of {member.peer}": count
            for member in gossip.others
            if member.live
            for accuser, count in gossip.rules.accusers(member.peer).items()
        },
        "warnings": list(node.warnings),
        "relayed": node.relay.table.document(),
        **({"microbatches": asdict(node.stages.context.counts)} if node.stages else {}),
        "loop_lag_ms": node.lag.summary_ms(),
        "verdicts": node.locator.verdicts(),
        "measured": node.measured(),
    }


def _member(
    member: Member, names: Mapping[str, str], rtt_s: float | None, traffic: Traffic, *, staged: bool
) -> dict[str, object]:
    relays = relays_of(member.address, names)
    return {
        "peer": member.peer,
        **({"stage": member.stage} if staged else {}),
        "address": member.address,
        "health": member.health.name.lower(),
        "phase": member.phase.name.lower(),
        "step": member.step,
        "rtt_ms": None if rtt_s is None else round(1000 * rtt_s, 3),
        "sent_bytes": traffic.sent_to[member.peer],
        "received_bytes": traffic.received_from[member.peer],
        "versions": [digest.version for digest in member.digests],
        **{key: list(named) for key in ("unreachable", "idle") if (named := getattr(member, key))},
        "path": f"relayed by {' or '.join(relays)}" if relays else "direct",
    }


async def ask_peers(
    members: Iterable[Member], transport: Transport, only: str = ""
) -> dict[str, bytes]:
    """The status of each that answers in time, or one key of it, packed. io thread only."""
    places = asyncio.Semaphore(ASKED_AT_ONCE)
    request = pb.StatusRequest(only=only).SerializeToString()

    async def ask(at: Member) -> tuple[str, bytes] | None:
        async with places:
            try:
                raw = await transport.call(at.address, Method.STATUS, request, ANSWER_S, at.peer)
                return at.peer, wire.parse(pb.StatusReply, raw).document
            except (TransportError, wire.WireError):
                return None

    return dict(filter(None, await asyncio.gather(*map(ask, members))))
