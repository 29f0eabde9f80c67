"""What a worker answers `murmur status`, as plain values."""

import asyncio
import random
from collections.abc import Callable, Mapping

from worker.config import Config
from worker.exchange.context import Context
from worker.membership import Member
from worker.membership.io import GossipService
from worker.pipeline.profile import Profile
from worker.transport import Traffic

_PERIOD_S = 0.05
_SAMPLES = 20_000


class LagMonitor:
    """Sleeps 50 ms again and again and keeps a uniform sample of how much later it wakes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples_s: list[float] = []
        self._seen = 0
        self._max_s = 0.0
        self._rng = random.Random(0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            before = self._clock()
            await asyncio.sleep(_PERIOD_S)
            self._add(max(0.0, self._clock() - before - _PERIOD_S))

    def summary_ms(self) -> dict[str, float]:
        """p50, p99 and max so far, milliseconds; zeros before the first sample."""
        ordered = sorted(self._samples_s) or [0.0]
        return {
            "p50": round(1000 * ordered[len(ordered) // 2], 3),
            "p99": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 3),
            "max": round(1000 * self._max_s, 3),
        }

    def _add(self, lag_s: float) -> None:
        self._max_s = max(self._max_s, lag_s)
        self._seen += 1
        if len(self._samples_s) < _SAMPLES:
            self._samples_s.append(lag_s)
        elif (slot := self._rng.randrange(self._seen)) < _SAMPLES:
            self._samples_s[slot] = lag_s


def status_document(
    *,
    config: Config,
    context: Context,
    gossip: GossipService,
    traffic: Traffic,
    rounds: Mapping[str, int],
    loss: object,
    lag: LagMonitor,
    up_s: float,
) -> dict[str, object]:
    """Where this peer is, whom it knows, and what crossed the network so far. io thread only.

    Args:
        rounds: how many of this peer's were completed, and failed.
        loss: the latest, None as long as there is none.
        up_s: how long this peer has been listening: traffic is counted since then.
    """
    counts, me = context.counts, gossip.me
    return {
        "kind": "worker",
        "peer": me.peer,
        "run": f"{context.run:016x}",
        "preset": config.preset,
        "phase": me.phase.name.lower(),
        "step": me.step,
        "steps": config.run.steps,
        "loss": loss,
        "up_s": round(up_s, 1),
        "members": [_member(member, staged=config.stages.count > 1) for member in gossip.members],
        "traffic": {
            "bytes_sent": traffic.sent_bytes,
            "bytes_received": traffic.received_bytes,
            "payload_bytes_sent": counts.payload_sent_bytes,
            "payload_bytes_received": counts.payload_received_bytes,
            "sent_by_method": dict(traffic.sent),
            "received_by_method": dict(traffic.received),
        },
        "rounds": {**rounds, "late": counts.late, "takeovers": counts.takeovers},
        "refused": dict(counts.refused),
        "loop_lag_ms": lag.summary_ms(),
    }


def _member(member: Member, *, staged: bool) -> dict[str, object]:
    return {
        "peer": member.peer,
        **(_staged(member) if staged else {}),
        "address": member.address,
        "health": member.health.name.lower(),
        "phase": member.phase.name.lower(),
        "step": member.step,
        "versions": [digest.version for digest in member.digests],
    }


def _staged(member: Member) -> dict[str, object]:
    """`visits_per_s`: of its stage, as the peer has measured; None while it has not."""
    visits_per_s = Profile.unpack(member.profile).visits_per_s
    return {"stage": member.stage, "visits_per_s": round(visits_per_s, 3) or None}
