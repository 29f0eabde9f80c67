"""Which worker of a swarm on this machine serves which stage."""

from collections.abc import Mapping

import numpy as np

from algorithms.link import Link
from algorithms.skippipe.cost import Links, activation_bytes
from algorithms.skippipe.proposal import Swarm, propose_placement
from algorithms.skippipe.route import Rules

_FORWARD_S = 0.01  # of every stage on every worker: only links make them differ here
_MEMORY = 3
_MICROBATCHES = 3
_MESSAGE_BYTES = activation_bytes(dim=96, context=128, samples=4, element_bytes=2)


def stages_of(links: Mapping[str, Link | None], workers: int, stages: int) -> list[int]:
    """The stage of each worker, in turns; on links of their own, where the way round is shortest.

    Args:
        links: by name, `w0`, `w1`, ...; empty or all alike leaves them in turns.
        workers: a multiple of `stages`.
    """
    known = [links.get(f"w{index}") for index in range(workers)]
    if len(set(known)) < 2:
        return [index % stages for index in range(workers)]
    swarm = Swarm(
        links=Links.of_lines(known),
        message_bytes=_MESSAGE_BYTES,
        exchange_s=np.zeros((workers, workers)),
        memory=(_MEMORY,) * workers,
        forward_s=np.full((workers, stages), _FORWARD_S),
        backward_s=np.full((workers, stages), 2.5 * _FORWARD_S),
        loss_s=np.full(workers, _FORWARD_S / 4),
    )
    placed = propose_placement(
        swarm,
        (workers // stages,) * stages,
        Rules(stages=stages, visited=stages),
        _MICROBATCHES,
        shared_uplinks=True,
    )
    stage_of = {worker: stage for stage, served in enumerate(placed) for worker in served}
    return [stage_of[index] for index in range(workers)]
