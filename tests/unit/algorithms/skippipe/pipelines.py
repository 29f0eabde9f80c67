"""Random pipelines for properties, an even one for closed forms, and what routes must keep to."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.pipeline import (
    BACKWARD_RATIO,
    LOSS_RATIO,
    Costs,
    Floats,
    Pipeline,
)
from murmuration.algorithms.skippipe.route import Route, Rules, keeps_rules


def even_pipeline(sizes: tuple[int, ...], *, memory: int = 3) -> Pipeline:
    """Peers numbered through the stages; all hops and visits alike."""
    peers = sum(sizes)
    delays_s = np.full((peers, peers), 0.5)
    costs = costs_of(delays_s, 0.0 * delays_s, [1.0] * peers)
    return Pipeline(stages=numbered(sizes), memory=(memory,) * peers, costs=costs)


def costs_of(delay_s: Floats, transfer_s: Floats, forward_s: Sequence[float]) -> Costs:
    """A backward and a loss in proportion to each peer's forward; a peer sends itself nothing."""
    forward = np.array(forward_s, dtype=np.float64)
    others = 1.0 - np.eye(len(forward))
    return Costs(
        delay_s=delay_s * others,
        transfer_s=transfer_s * others,
        forward_s=forward,
        backward_s=BACKWARD_RATIO * forward,
        loss_s=LOSS_RATIO * forward,
    )


def numbered(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Peers 0, 1, 2, ... on stages of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))


def uneven_pipeline(
    sizes: tuple[int, ...], random: np.random.Generator, *, latency_s: float = 0.2
) -> Pipeline:
    """Links up to this latency, speeds and memories are all drawn."""
    peers = sum(sizes)
    delays_s = random.uniform(0.0, latency_s, (peers, peers))
    transfers_s = 4e6 / random.uniform(1e6, 1e8, (peers, peers))
    memory = tuple(random.integers(1, 4, peers).tolist())
    costs = costs_of(delays_s, transfers_s, random.uniform(0.1, 1.0, peers).tolist())
    return Pipeline(stages=numbered(sizes), memory=memory, costs=costs)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Pipeline, Rules, list[int], int]:
    """(pipeline, rules, origins, seed): 1 to 6 stages, 1 to 3 replicas, all unequal; long jumps."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)))
    pipeline = uneven_pipeline(sizes, np.random.default_rng(draw(st.integers(0, 2**32))))
    visited = draw(st.integers(min(2, len(sizes)), len(sizes)))
    rules = Rules(stages=len(sizes), visited=visited, max_jump=6)
    origins = list(pipeline.stages[0]) * draw(st.integers(1, 3))
    return pipeline, rules, origins, draw(st.integers(0, 2**32))


def assert_fit_together(
    routes: Sequence[Route], pipeline: Pipeline, rules: Rules, limits: Sequence[int]
) -> None:
    """Routes that are in flight together keep the rules, cover stages equally and fit into memory.

    Args:
        limits: of each peer, how many of the routes may visit it (see `draws.peer_limits`)."""
    for route in routes:
        assert keeps_rules(route.stages(pipeline), rules)
    visits = Counter(stage for route in routes for stage in route.stages(pipeline))
    counts = [visits[stage] for stage in range(1, rules.stages)]
    assert not counts or max(counts) - min(counts) <= 1
    # What begins on stage 0 waits there for its turn, so only the other stages can be overrun.
    loads = Counter(peer for route in routes for peer in route.peers[1:])
    assert all(load <= limits[peer] for peer, load in loads.items())
