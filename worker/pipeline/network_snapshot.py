"""What peers have told of themselves, as what routes are planned on.

Who has heard the same makes the same table. It is named by a hash of all that it is made of, so
that peers can tell whether they plan with the same measurements.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from algorithms.skippipe.pipeline import BACKWARD_RATIO, LOSS_RATIO, Costs, Floats, Links, Pipeline
from worker.membership import Member
from worker.pipeline.config import StagesConfig
from worker.pipeline.context import serves
from worker.pipeline.profile import Profile

_RECOMPUTED = 1.0 + BACKWARD_RATIO  # a backward does its forward again
_USUAL_FORWARD_S = 0.01
_USUAL_RATE = 2.5e6  # bytes/s
_USUAL_BYTES = 100_000
_USUAL_MEMORY = 3


@dataclass(frozen=True, kw_only=True)
class NetworkSnapshot:
    """The peers that serve, in the order of their numbers, and what routes are planned on.

    Args:
        peers, profiles: the names, and what each of them has told.
        stages: those that have a replica: a pipeline's stage n is the model's stages[n].
        pipeline: with what nobody has measured filled in.
        name: of the measurements, not of any routes.
    """

    peers: tuple[str, ...]
    profiles: tuple[Profile, ...]
    stages: tuple[int, ...]
    pipeline: Pipeline
    name: int


def table_name(members: Iterable[Member]) -> int:
    """A hash of who serves what, and of what each has measured."""
    digest = xxhash.xxh3_64()
    for member in sorted(
        (member for member in members if serves(member)), key=lambda member: member.peer
    ):
        digest.update(
            f"{member.peer}/{member.epoch}/{member.stage}/{len(member.profile)}/".encode()
        )
        digest.update(member.profile)
    return digest.intdigest()


def table_of(members: Sequence[Member]) -> NetworkSnapshot | None:
    """What nobody has measured is taken to be as usual; None without a replica of stage 0."""
    members = sorted(members, key=lambda member: member.peer)
    stages = sorted({member.stage for member in members})
    if not stages or stages[0] != 0:
        return None
    peers = tuple(member.peer for member in members)
    profiles = tuple(Profile.unpack(member.profile) for member in members)
    links = links_of(peers, profiles)
    forward_s = _filled([p.forward_s for p in profiles], _USUAL_FORWARD_S)
    usual_s = statistics.median(forward_s)
    costs = Costs(
        delay_s=links.delay_s(),
        transfer_s=links.transfer_s(_visit_bytes(profiles) or _USUAL_BYTES),
        forward_s=np.array(forward_s),
        backward_s=np.array(_filled([p.backward_s for p in profiles], _RECOMPUTED * usual_s)),
        loss_s=np.array(_filled([p.loss_s for p in profiles], LOSS_RATIO * usual_s)),
    )
    memories = [profile.memory for profile in profiles if profile.memory]
    usual = statistics.median_low(memories) if memories else _USUAL_MEMORY
    numbered = {
        stage: tuple(n for n, member in enumerate(members) if member.stage == stage)
        for stage in stages
    }
    pipeline = Pipeline(
        stages=tuple(numbered.values()),
        memory=tuple(profile.memory or usual for profile in profiles),
        costs=costs,
    )
    return NetworkSnapshot(
        peers=peers,
        profiles=profiles,
        stages=tuple(stages),
        pipeline=pipeline,
        name=table_name(members),
    )


def links_of(peers: Sequence[str], profiles: Sequence[Profile]) -> Links:
    """The median of what is known between these peers in place of what is not."""
    return Links(
        latency_s=_without_gaps(_told_latency_s(peers, profiles), 0.0),
        rate_bytes_per_s=_without_gaps(_told_rate(peers, profiles), _USUAL_RATE),
    )


def measured_share(table: NetworkSnapshot) -> float:
    """Of the pairs of peers, how many know their latency, and a rate one way at least."""
    if len(table.peers) < 2:
        return 0.0
    rate = _told_rate(table.peers, table.profiles)
    known = ~np.isnan(_told_latency_s(table.peers, table.profiles) + np.fmax(rate, rate.T))
    np.fill_diagonal(known, False)
    return float(known.sum()) / (known.size - len(known))


def links_document(table: NetworkSnapshot, config: StagesConfig) -> dict[str, object]:
    """What `murmur plan --links` reads: plain values, None for what nobody has measured."""
    peers, profiles = table.peers, table.profiles
    return {
        "peers": list(peers),
        "stage": [table.stages[stage] for stage in table.pipeline.stage_of],
        "latency_s": _plain(_told_latency_s(peers, profiles)),
        "rate_bytes_per_s": _plain(_told_rate(peers, profiles)),
        "forward_s": [profile.forward_s or None for profile in profiles],
        "backward_s": [profile.backward_s or None for profile in profiles],
        "loss_s": [profile.loss_s or None for profile in profiles],
        "memory": [profile.memory or None for profile in profiles],
        "activation_bytes": _visit_bytes(profiles),
        "microbatches": config.microbatches,
        "skip": config.skip,
        "spread": config.spread,
    }


def _told_latency_s(peers: Sequence[str], profiles: Sequence[Profile]) -> Floats:
    """(P, P), NaN where nothing is told. Both ends measure, and the shorter time is the link's."""
    told = np.array([[p.latency_s.get(peer, math.nan) for peer in peers] for p in profiles])
    latency_s: Floats = np.fmin(told, told.T)
    np.fill_diagonal(latency_s, math.nan)
    return latency_s


def _told_rate(peers: Sequence[str], profiles: Sequence[Profile]) -> Floats:
    """(P, P) in bytes/s, NaN where the sender has told nothing."""
    rate = np.array(
        [[each.rate_bytes_per_s.get(peer) or math.nan for peer in peers] for each in profiles]
    )
    np.fill_diagonal(rate, math.nan)
    return rate


def _visit_bytes(profiles: Sequence[Profile]) -> int | None:
    return max((profile.visit_bytes for profile in profiles), default=0) or None


def _filled(seconds: Sequence[float], usual_s: float) -> list[float]:
    """The median of what is known in place of zeros."""
    known = [s for s in seconds if s > 0]
    usual_s = statistics.median(known) if known else usual_s
    return [s or usual_s for s in seconds]


def _without_gaps(told: Floats, usual: float) -> Floats:
    gaps = np.isnan(told)
    return np.where(gaps, usual if gaps.all() else np.median(told[~gaps]), told)


def _plain(matrix: Floats) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in matrix.tolist()]
