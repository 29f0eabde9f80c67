"""From the profiles that peers gossip to the routes of this peer's microbatches.

Peers that have heard the same make the same snapshot, named by a hash of its contents. From it
follow the same routes everywhere: those of `full`, `random` and `stochastic` at once, those of
`skip` when a search is over. There is no leader, and nobody waits: until then an origin goes on
with other routes, which costs time and nothing else. A peer that is called by the name of a
snapshot which it has not planned with lately gossips with that origin.
"""

import asyncio
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from murmuration.algorithms.skippipe import pipeline as pipelines
from murmuration.algorithms.skippipe.route import MAX_JUMP, Route, Rules
from murmuration.algorithms.skippipe.search import ROUTINGS, origins_in_turns, random, search_routes
from murmuration.worker.background import cancel
from murmuration.worker.membership import Member
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stage_call import Hop, serves
from murmuration.worker.pipeline.stages_config import StagesConfig

_RECOMPUTED = 1.0 + pipelines.BACKWARD_RATIO  # a backward does its forward again
_USUAL_FORWARD_S = 0.01
_USUAL_RATE = 2.5e6  # bytes/s
_USUAL_BYTES = 100_000
_USUAL_MEMORY = 3

_LAG_S = 10.0  # for which calls may still name an earlier snapshot
_MOST_BEFORE = 256  # snapshots in that time


@dataclass(frozen=True)
class NetworkSnapshot:
    """The peers that serve and their measurements, as routes are planned on them."""

    peers: tuple[str, ...]  # in the order of their names
    # Those that have a replica: a pipeline's stage n is the model's stages[n].
    stages: tuple[int, ...]
    pipeline: pipelines.Pipeline
    name: int  # of the measurements, not of any routes

    @property
    def served(self) -> object:
        """The peers of each stage: where it is the same, nobody refuses a hop."""
        return self.peers, self.stages, self.pipeline.stages


def snapshot_name(members: Iterable[Member]) -> int:
    """A hash of which peer serves what, and of what each has measured."""
    digest = xxhash.xxh3_64()
    for each in sorted(filter(serves, members), key=lambda member: member.peer):
        digest.update(f"{each.peer}/{each.start_ms}/{each.stage}/{len(each.profile)}/".encode())
        digest.update(each.profile)
    return digest.intdigest()


def snapshot_of(members: Sequence[Member]) -> NetworkSnapshot | None:
    """Takes what nobody has measured to be as usual; None without a replica of stage 0."""
    members = sorted(members, key=lambda member: member.peer)
    stages = sorted({member.stage for member in members})
    if not stages or stages[0] != 0:
        return None
    peers = tuple(member.peer for member in members)
    profiles = tuple(Profile.unpack(member.profile) for member in members)
    delay_s, transfer_s = _hops_of(peers, profiles)
    forward_s = _known([p.forward_s or math.nan for p in profiles], _USUAL_FORWARD_S)
    usual_s = float(np.median(forward_s))
    backward_s = _known([p.backward_s or math.nan for p in profiles], _RECOMPUTED * usual_s)
    loss_s = _known([p.loss_s or math.nan for p in profiles], pipelines.LOSS_RATIO * usual_s)
    visits_s = {"forward_s": forward_s, "backward_s": backward_s, "loss_s": loss_s}
    costs = pipelines.Costs(delay_s=delay_s, transfer_s=transfer_s, **visits_s)
    usual = _median([profile.memory for profile in profiles], _USUAL_MEMORY)
    replicas = (tuple(n for n, m in enumerate(members) if m.stage == stage) for stage in stages)
    memory = tuple(profile.memory or usual for profile in profiles)
    pipeline = pipelines.Pipeline(stages=tuple(replicas), memory=memory, costs=costs)
    return NetworkSnapshot(peers, tuple(stages), pipeline, snapshot_name(members))


def _hops_of(
    peers: Sequence[str], profiles: Sequence[Profile]
) -> tuple[pipelines.Floats, pipelines.Floats]:
    """The delay and the transfer time of a microbatch between these peers, both (P, P)."""
    latency_s = np.array([[p.latency_s.get(peer, math.nan) for peer in peers] for p in profiles])
    latency_s = np.fmin(latency_s, latency_s.T)  # both ends measure; the shorter is the link's
    rates = [p.rate_bytes_per_s for p in profiles]
    rate = np.array([[each.get(peer) or math.nan for peer in peers] for each in rates])
    message_bytes = _median([profile.activation_bytes for profile in profiles], _USUAL_BYTES)
    for measured in (latency_s, rate):
        np.fill_diagonal(measured, math.nan)
    delay_s, transfer_s = _known(latency_s, 0.0), message_bytes / _known(rate, _USUAL_RATE)
    for times_s in (delay_s, transfer_s):
        np.fill_diagonal(times_s, 0.0)
    return delay_s, transfer_s


def _median(told: Sequence[int], usual: int) -> int:
    """The median of what is known: no one peer's word decides."""
    known = [*filter(None, told)]
    return statistics.median_low(known) if known else usual


def _known(measured: pipelines.Floats | Sequence[float], usual: float) -> pipelines.Floats:
    """The measurements, with the median of those that are known in place of NaN."""
    measured = np.array(measured)
    gaps = np.isnan(measured)
    return np.where(gaps, usual if gaps.all() else np.median(measured[~gaps]), measured)


# All origins' routes, with the snapshot that they are on: an older one while a search runs.
_Planned = tuple[NetworkSnapshot, Sequence[Route]]


class RoutePlanner:
    """The routes of this peer. io thread only. Until a search has found some for the last
    measurements, those before go on, or random ones where they would not be served any more."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._name: int | None = None  # of the latest measurements, which these members had
        self._members: Sequence[Member] = ()
        self._replaced: dict[int, float] = {}  # when, by the name of the snapshot; the latest last
        self._snapshot: NetworkSnapshot | None = None
        self._found: dict[int, _Planned] = {}
        self._failed: dict[int, int] = {}  # by kind, the snapshot that no routes were found for
        self._searching: asyncio.Task[None] | None = None

    def on_view(self) -> int:
        """Profiles may have changed: the name of what this peer would plan with now."""
        members = self._context.members()
        if self._name is not None and members is self._members:
            return self._name
        self._members, name = members, snapshot_name(members)
        if name != self._name:
            if self._name is not None:
                self._replaced.pop(self._name, None)
                self._replaced[self._name] = self._context.clock()
            if len(self._replaced) > _MOST_BEFORE:
                del self._replaced[next(iter(self._replaced))]
            self._name = name
        return name

    def knows(self, name: int) -> bool:
        """Tells whether this peer plans with the snapshot of that name, or did a moment ago."""
        if name == self.on_view():
            return True
        return self._context.clock() - self._replaced.get(name, -math.inf) <= _LAG_S

    def routes(self, iteration: int) -> tuple[list[tuple[Hop, ...]], int]:
        """(the route behind stage 0 of each of this peer's microbatches, the snapshot's name)."""
        context, name = self._context, self.on_view()
        if self._snapshot is None or self._snapshot.name != name:
            self._snapshot = snapshot_of(context.serving())
        count, snapshot = context.config.microbatches, self._snapshot
        if snapshot is None or context.me not in snapshot.peers:
            return [()] * count, name
        of, routes = self._planned(snapshot, iteration)
        me, stage_of = of.peers.index(context.me), of.pipeline.stage_of
        mine = [
            tuple(Hop(of.stages[stage_of[peer]], of.peers[peer]) for peer in route.peers[1:])
            for route in routes
            if route.origin == me
        ]
        assert len(mine) == count, "every origin begins as many microbatches"
        return mine, snapshot.name

    async def close(self) -> None:
        if self._searching is not None:
            await cancel([self._searching])

    def _planned(self, snapshot: NetworkSnapshot, iteration: int) -> _Planned:
        config, seed = self._context.config, self._context.seed
        rules = planned_rules(config, snapshot, iteration)
        origins = origins_in_turns(snapshot.pipeline, config.microbatches)
        if config.routing != "skip" or rules.stages == 1:
            routing = ROUTINGS[config.routing]
            return snapshot, routing(snapshot.pipeline, rules, origins, seed + iteration)
        # A few kinds of searched routes even out what does not divide.
        kind = -1 if rules.visited == rules.stages else iteration % (rules.stages - 1)
        before = self._found.get(kind)
        if before is not None and before[0].name == snapshot.name:
            return before
        idle = self._searching is None or self._searching.done()
        if idle and self._failed.get(kind) != snapshot.name:
            work = self._search(kind, snapshot, rules, origins, seed + kind)
            self._searching = asyncio.get_running_loop().create_task(work)
        if before is not None and before[0].served == snapshot.served:
            return before
        return snapshot, random(snapshot.pipeline, rules, origins, seed + iteration)

    async def _search(
        self, kind: int, snapshot: NetworkSnapshot, rules: Rules, origins: Sequence[int], seed: int
    ) -> None:
        try:
            search = partial(search_routes, snapshot.pipeline, rules, origins, seed=seed)
            found = await self._context.offload(search)
        except Exception as error:  # whatever it is, training goes on with the routes it has
            self._failed[kind] = snapshot.name
            text = f"no routes were searched: {type(error).__name__}: {error}"
            self._context.event("warning", text=text)
        else:
            self._found[kind] = snapshot, found


def planned_rules(config: StagesConfig, snapshot: NetworkSnapshot, iteration: int) -> Rules:
    """The iteration's rules, for the stages that have a replica."""
    stages, whole = len(snapshot.stages), config.rules(iteration)
    fewest = 1 + -(-(stages - 1) // MAX_JUMP)  # what is left may be too little to skip as much
    visited = max(fewest, stages - (whole.stages - whole.visited))
    return Rules(stages=stages, visited=visited)
