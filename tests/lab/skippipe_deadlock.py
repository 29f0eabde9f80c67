"""Do schedules deadlock when memory is short? Ascending ones must not; those with swaps may.

    python -m tests.lab skippipe-deadlock [--schedules 10000] [--seed 0]

Random pipelines (2 to 7 stages, 1 to 4 replicas), costs, skips and routes, each peer with room for
1 to 3 microbatches, in the event simulator. The same schedules are then run with swaps: up to two
neighbours of a route change places, which no route of ours does, to show that the simulator would
see a deadlock. Fails if an ascending one deadlocks, or none with swaps.
"""

import argparse
from collections import Counter

import numpy as np

from murmuration.algorithms.skippipe.pipeline import Links, Pipeline
from murmuration.algorithms.skippipe.route import Route, Rules
from murmuration.algorithms.skippipe.routing import random
from tests.lab.timeline import Deadlock, simulate
from tests.support.stage_costs import costs_of

MEMORIES = (1, 2, 3)


def main() -> int:
    """Prints how many schedules deadlock; 1 if it is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| memory | schedules | deadlocks, ascending | deadlocks, with swaps |")
    print("| --- | --- | --- | --- |")
    seen: Counter[bool] = Counter()
    example = None
    for memory in MEMORIES:
        seeds = range(options.seed + memory, options.seed + options.schedules + 1, len(MEMORIES))
        found = {
            swaps: [schedule_deadlock(memory, swaps, s) for s in seeds] for swaps in (False, True)
        }
        counts = {swaps: sum(each is not None for each in found[swaps]) for swaps in found}
        seen.update(counts)
        example = example or next((each for each in found[True] if each is not None), None)
        print(f"| {memory} | {len(seeds)} | {counts[False]} | {counts[True]} |", flush=True)
    if example is not None:
        print(f"for instance: {example.reason}")
    return 0 if seen[False] == 0 and seen[True] > 0 else 1


def schedule_deadlock(memory: int, swaps: bool, seed: int) -> Deadlock | None:
    """Why a schedule drawn by a seed never ends; None if it ends."""
    return simulate(*random_schedule(memory, swaps, seed)).deadlock


def random_schedule(memory: int, swaps: bool, seed: int) -> tuple[Pipeline, list[Route]]:
    """A pipeline and the routes of one iteration."""
    draws = np.random.default_rng(seed)
    stages: list[tuple[int, ...]] = []
    peers = 0
    for size in draws.integers(1, 5, size=draws.integers(2, 8)):
        stages.append(tuple(range(peers, peers + int(size))))
        peers += int(size)
    links = Links(
        latency_s=draws.uniform(0.0, 0.1, (peers, peers)),
        rate_bytes_per_s=draws.uniform(1e6, 1e8, (peers, peers)),
    )
    pipeline = Pipeline(
        stages=tuple(stages),
        memory=(memory,) * peers,
        costs=costs_of(links, draws.uniform(0.1, 1.0, peers).tolist(), 1e6),
    )
    visited = int(draws.integers(2, len(stages) + 1))
    rules = Rules(stages=len(stages), visited=visited, max_jump=len(stages))
    origins = draws.choice(stages[0], size=int(draws.integers(1, 25))).tolist()
    routes = random(pipeline, rules, origins, seed)
    return pipeline, [swapped(route, draws) for route in routes] if swaps else routes


def swapped(route: Route, draws: np.random.Generator) -> Route:
    """With up to two pairs of neighbours exchanged; the origin stays first."""
    peers = list(route.peers)
    for _ in range(int(draws.integers(0, 3)) if len(peers) > 2 else 0):
        at = int(draws.integers(1, len(peers) - 1))
        peers[at : at + 2] = reversed(peers[at : at + 2])
    return Route(tuple(peers))


if __name__ == "__main__":
    raise SystemExit(main())
