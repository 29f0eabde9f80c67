"""Many random fault schedules of pair rounds in the product's simulator: nothing may be violated.

    python -m tests.lab pair-schedules [--schedules 100000] [--seed 0] [--processes 1]
                                       [--shuffled]

2 to 6 peers in groups of 2 to 4 hold 1 to 3 rounds on a virtual clock and network, with the live
code. Streams break, links are cut, halves part, messages are late, peers die, freeze, come late,
and take each other for dead. With `--shuffled` what is ready at one time runs in an order that the
seed draws. Prints what went wrong, how the rounds ended, and how often a
peer gave up a round that another has applied (the two generals), by what excuses it. Fails on any
violation, such as a peer left behind without an excuse.
"""

import argparse
import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch

from tests.support.pair_schedules import (
    endings,
    left_behind,
    random_world,
    undisturbed,
    violations,
)

SHOWN = 20
BATCH = 500

Counts = tuple[Counter[str], Counter[str], Counter[str], list[str]]


def play(seeds: range, shuffled: bool) -> Counts:
    """What happened in the schedules of these seeds: faults, endings, excuses, violations."""
    torch.set_num_threads(1)
    faults, rounds, causes = Counter[str](), Counter[str](), Counter[str]()
    violated: list[str] = []
    gc.disable()
    for seed in seeds:
        world = random_world(seed, shuffled=shuffled).play()
        faults.update(type(fault).__name__ for fault in world.faults)
        rounds.update(endings(world))
        rounds["undisturbed groups"] += sum(1 for _ in undisturbed(world))
        causes.update(cause for _, cause in left_behind(world))
        violated += (f"seed {seed}: {text}" for text in violations(world))
    gc.enable()
    gc.collect()
    return faults, rounds, causes, violated


def results(batches: list[range], processes: int, shuffled: bool) -> Iterator[Counts]:
    work = partial(play, shuffled=shuffled)
    if processes == 1:
        yield from map(work, batches)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(work, batches)


def main() -> int:
    """Prints the counts; 1 if something was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--shuffled", action="store_true", help="the ready queue, by the seed")
    options = parser.parse_args()
    began, end = time.monotonic(), options.seed + options.schedules
    faults, rounds, causes = Counter[str](), Counter[str](), Counter[str]()
    violated = 0
    batches = [range(at, min(at + BATCH, end)) for at in range(options.seed, end, BATCH)]
    for of_faults, of_rounds, of_causes, texts in results(
        batches, options.processes, options.shuffled
    ):
        faults.update(of_faults)
        rounds.update(of_rounds)
        causes.update(of_causes)
        for text in texts[: max(0, SHOWN - violated)]:
            print(text, flush=True)
        violated += len(texts)
    took_s = time.monotonic() - began
    print(f"schedules: {options.schedules} from seed {options.seed}")
    print(f"violations: {violated}")
    print(f"seconds: {took_s:.0f} on {options.processes} processes")
    for title, counts in (("faults", faults), ("rounds", rounds), ("two generals", causes)):
        each = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        print(f"{title}: {each}")
    return 1 if violated else 0


if __name__ == "__main__":
    raise SystemExit(main())
