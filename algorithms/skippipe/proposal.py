"""Which peer should serve which stage: the searched placement, turned to where it is fastest.

The tour of a placement is a circle, so its score does not say which of its stages is stage 0 or
which way round it goes; an iteration does. Each turn is judged by a quick search and a simulation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from algorithms.skippipe.cost import Costs, Floats, Links
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.placement import Groups, place
from algorithms.skippipe.prediction import origins_in_turns, predict
from algorithms.skippipe.route import Rules

_JUDGING_EFFORT_S = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Swarm:
    """P peers that could serve any of S stages.

    Args:
        links: between them.
        message_bytes: of one microbatch's activations, and of their gradient.
        exchange_s: what two replicas of a stage take to exchange its parameters, as a share of the
            time of one wave of microbatches, shape (P, P); zeros leave it out.
        memory: of each peer, how many microbatches it may hold.
        forward_s, backward_s: of a visit of each stage on each peer, shape (P, S).
        loss_s: on each peer, shape (P,).
    """

    links: Links
    message_bytes: float
    exchange_s: Floats
    memory: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    loss_s: Floats

    def pipeline(self, stages: Groups) -> Pipeline:
        """The swarm with its peers on stages. Raises ValueError as Pipeline does."""
        stage_of = np.zeros(self.links.peers, dtype=np.int64)
        for stage, replicas in enumerate(stages):
            stage_of[list(replicas)] = stage
        everyone = np.arange(self.links.peers)
        costs = Costs(
            delay_s=self.links.delay_s(),
            transfer_s=self.links.transfer_s(self.message_bytes),
            forward_s=self.forward_s[everyone, stage_of],
            backward_s=self.backward_s[everyone, stage_of],
            loss_s=self.loss_s,
        )
        return Pipeline(stages=stages, memory=self.memory, costs=costs)


def propose_placement(
    swarm: Swarm,
    sizes: Sequence[int],
    rules: Rules,
    microbatches: int,
    *,
    seed: int = 0,
    shared_uplinks: bool = False,
) -> Groups:
    """The peers of each stage.

    Args:
        sizes: replicas of each stage.
        rules: of the routes by which turns are judged.
        microbatches: of each replica of stage 0.

    Raises:
        ValueError: sizes that do not add up to the peers.
    """
    edge_s = swarm.links.edge_s(swarm.message_bytes)
    placement = place(sizes, edge_s, swarm.exchange_s, seed=seed)

    def iteration_s(stages: Groups) -> float:
        pipeline = swarm.pipeline(stages)
        return predict(
            pipeline,
            rules,
            origins_in_turns(pipeline, microbatches),
            "skip",
            seed,
            shared_uplinks=shared_uplinks,
            effort_s=_JUDGING_EFFORT_S,
        ).iteration_s

    return min(_turned(placement.stages), key=lambda stages: (iteration_s(stages), stages))


def _turned(stages: Groups) -> Iterator[Groups]:
    """The circle from each of its stages and either way, where that keeps the stages' sizes."""
    sizes = list(map(len, stages))
    seen = set()
    for circle in (stages, stages[::-1]):
        for begin in range(len(circle)):
            turned = (*circle[begin:], *circle[:begin])
            if turned not in seen and list(map(len, turned)) == sizes:
                seen.add(turned)
                yield turned
