"""Who would leave its stage for which: the same answer from the same cards, wherever they are."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from algorithms.codecs import codec_by_name
from algorithms.plan import Plan
from algorithms.skippipe.assignment import best_mover, stage_to_move_to
from algorithms.skippipe.pipeline import Floats
from algorithms.skippipe.placement import PlacementScore
from worker.membership import Member
from worker.pipeline.config import StagesConfig
from worker.pipeline.network_snapshot import links_of, measured_share, table_of
from worker.pipeline.profile import Profile

_ENOUGH = 0.5  # of the links, measured, to choose by them
_NEAR_S = 0.01  # hops that take less count alike: such figures tell of machines, not of links


@dataclass(frozen=True)
class StageExchange:
    """What replicas of a stage exchange of its parameters, the same for all stages.

    Args:
        message_bytes: to a replica; 0 where nothing is exchanged.
        every_iterations: H.
        microbatches: of an origin and iteration.
    """

    message_bytes: int
    every_iterations: int
    microbatches: int

    @classmethod
    def of(cls, plan: Plan, stages: StagesConfig, elements: int) -> "StageExchange":
        """Args: elements: of the whole model; stages are about equal."""
        codec = codec_by_name(plan.codec)
        return cls(
            message_bytes=0
            if plan.exchange == "none"
            else codec.encoded_bytes(elements // stages.count),
            every_iterations=plan.inner_steps,
            microbatches=stages.microbatches,
        )


class Rebalancing:
    """One look at the peers that train.

    Where fewer than half of the links between them are measured, the last by name moves.

    Args:
        cards: of those peers; stages: how many there are.
    """

    def __init__(self, members: Iterable[Member], stages: int, exchange: StageExchange) -> None:
        self._members, self._exchange = sorted(members, key=lambda member: member.peer), exchange
        self._stage_of = [member.stage for member in self._members]
        self._stages = stages

    def to_bare(self, bare: Sequence[int]) -> dict[int, str]:
        """Who would make each of these stages anew: of the stage with the most replicas, that of
        the origins last. A stage that nobody can be spared for is left out."""
        movers: dict[int, str] = {}
        for stage in bare:
            if not (spare := self._spare()):
                break
            mover = self._best(spare, stage)
            self._stage_of[mover] = stage
            movers[stage] = self._members[mover].peer
        return movers

    def to_slowest(self) -> tuple[str, int] | None:
        """(who, to which stage): of those whose move makes the slowest stage faster by enough.
        Stage 0 is left alone."""
        numbers = [n for n, stage in enumerate(self._stage_of) if stage > 0]
        speeds = {n: Profile.unpack(self._members[n].profile).visits_per_s for n in numbers}
        if not all(speeds.values()):
            speeds = dict.fromkeys(speeds, 1.0)
        serving = [
            {n: speeds[n] for n in numbers if self._stage_of[n] == stage}
            for stage in range(1, self._stages)
        ]
        moves = {n: stage_to_move_to(n, serving).stage for n in reversed(numbers)}
        gaining = [n for n, stage in moves.items() if stage is not None]
        if not gaining:
            return None
        to = 1 + next(stage for stage in moves.values() if stage is not None)
        return self._members[self._best(gaining, to)].peer, to

    def _spare(self) -> list[int]:
        replicas = Counter(self._stage_of)
        most = max(replicas.values(), default=0)
        if most < 2:
            return []
        fullest = {stage for stage, count in replicas.items() if count == most}
        able = (fullest - {0}) or fullest
        spare = [n for n in reversed(range(len(self._members))) if self._stage_of[n] in able]
        return sorted(spare, key=lambda n: self._stage_of[n])

    def _best(self, movers: Sequence[int], to: int) -> int:
        if self._score is None:
            return movers[0]
        numbered = list(enumerate(self._stage_of))
        groups = [tuple(n for n, each in numbered if each == s) for s in range(self._stages)]
        return best_mover(movers, to, tuple(groups), self._score)

    @cached_property
    def _score(self) -> PlacementScore | None:
        table = table_of(self._members)
        if table is None or measured_share(table) < _ENOUGH:
            return None
        exchange, pipeline = self._exchange, table.pipeline
        waves = math.ceil(exchange.microbatches / min(pipeline.memory))
        links = links_of(table.peers, table.profiles)
        share = 1 / (exchange.every_iterations * waves) if exchange.message_bytes else 0.0
        exchange_s = share * _coarse(links.edge_s(exchange.message_bytes))
        return PlacementScore(_coarse(pipeline.costs.edge_s), exchange_s)


def _coarse(edge_s: Floats) -> Floats:
    return np.where(edge_s > 0, np.maximum(edge_s, _NEAR_S), 0.0)
