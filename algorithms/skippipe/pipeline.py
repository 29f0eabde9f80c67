"""Who serves which stage, at which cost and with how much memory."""

from dataclasses import dataclass
from functools import cached_property

from algorithms.skippipe.cost import Costs


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """Peers are the numbers 0..P-1.

    Args:
        stages: the peers that serve each stage, its replicas. Each peer serves one stage.
        memory: of each peer, how many microbatches it may hold between forward and backward.
        costs: of hops and visits.

    Raises:
        ValueError: a stage without a replica, a peer without a stage or memory.
    """

    stages: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]
    costs: Costs

    def __post_init__(self) -> None:
        for stage, replicas in enumerate(self.stages):
            if not replicas:
                raise ValueError(f"stage {stage} has no replica: place a peer on it")
        serving = sorted(peer for replicas in self.stages for peer in replicas)
        if serving != list(range(len(self.costs.forward_s))):
            raise ValueError(
                f"peers {serving} serve a stage; each of 0 to {len(self.costs.forward_s) - 1} "
                "must serve exactly one"
            )
        if len(self.memory) != len(serving) or min(self.memory) < 1:
            raise ValueError(
                f"memory {self.memory} must be at least 1 for each of {len(serving)} peers"
            )

    @property
    def peers(self) -> int:
        return len(self.memory)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage that each peer serves."""
        stage_of = [0] * self.peers
        for stage, replicas in enumerate(self.stages):
            for peer in replicas:
                stage_of[peer] = stage
        return tuple(stage_of)

    @cached_property
    def edges(self) -> tuple[tuple[float, ...], ...]:
        """`costs.edge_s` as plain numbers: loops read them faster than arrays."""
        return tuple(map(tuple, self.costs.edge_s.tolist()))
