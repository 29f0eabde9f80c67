"""Many random fault schedules of rounds in the product's simulator: nothing may be violated.

    python -m tests.lab schedules means|pairs [--schedules 100000] [--processes 2] [--seed 0]
                                              [--shuffled] [--keep]

2 to 5 peers hold leaderless means, or 2 to 6 peers hold rounds in groups of 2 to 4, with the live
code on a virtual clock and network. Streams break, links are cut, halves part, messages are late,
peers die, freeze, come late, and take each other for dead. With `--shuffled` what is ready at one
time runs in an order that the seed draws. Prints how rounds ended, and fails on any violation.

Of means it prints how often two reductions of one shard were applied, and follows every element of
every pseudo-gradient: it is in the anchor or kept in the local parameters, `once`. `again` is one
that is kept though it counts, `other reduction` one that stands nowhere, since its shard was
reduced twice. With `--keep` of one bit each every element must stand once.

Of pairs it prints how often a peer gave up a round that another has applied (the two generals), by
what excuses it, and how many groups no fault has touched.
"""

import argparse
import gc
import multiprocessing
import time
from collections import Counter
from functools import partial

import torch

from tests.support import mean_schedules, pair_schedules

SHOWN = 20
AT_ONCE = 250

Counts = dict[str, Counter[str]]


def main() -> int:
    """Prints the counts; 1 if something was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("means", "pairs"))
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true", help="the ready queue, by the seed")
    parser.add_argument("--keep", action="store_true", help='of means: merge = "keep", in one bit')
    options = parser.parse_args()
    began, stop = time.monotonic(), options.seed + options.schedules
    parts = [range(at, min(at + AT_ONCE, stop)) for at in range(options.seed, stop, AT_ONCE)]
    total: Counts = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        work = partial(play, options.kind, keep=options.keep, shuffled=options.shuffled)
        for counts in pool.imap_unordered(work, parts):
            for title, each in counts.items():
                total.setdefault(title, Counter()).update(each)
    print(f"schedules: {options.schedules} from seed {options.seed}")
    for title, each in total.items():
        listed = ", ".join(f"{name} {number}" for name, number in each.most_common(SHOWN))
        print(f"{title}: {each.total()}" + (f" ({listed})" if each else ""))
    print(f"seconds: {time.monotonic() - began:.0f}")
    wrong = total["elements"].total() - total["elements"]["once"] if options.keep else 0
    if options.keep:
        print(f"verdict: {'not every element stands once' if wrong else 'every element once'}")
    return 1 if wrong or total["violations"] else 0


def play(kind: str, seeds: range, keep: bool, shuffled: bool) -> Counts:
    """Some of the schedules."""
    torch.set_num_threads(1)
    counts: Counts = {}
    gc.disable()
    for seed in seeds:
        of_means = kind == "means"
        found, violated = _means(seed, keep, shuffled) if of_means else _pairs(seed, shuffled)
        for title, each in found.items():
            counts.setdefault(title, Counter()).update(each)
        counts.setdefault("violations", Counter()).update(text.split(":")[0] for text in violated)
        for text in violated:
            print(f"seed {seed}: {text}", flush=True)
    gc.enable()
    gc.collect()
    return counts


def _means(seed: int, keep: bool, shuffled: bool) -> tuple[Counts, list[str]]:
    """Runs one schedule: what happened, and what was violated."""
    run = mean_schedules.random_run(seed, *(("sign", "keep") if keep else ()), shuffled=shuffled)
    reduced = ("twice" if len(found) > 1 else "once" for found in run.applied().values())
    counts = {
        "faults": Counter(type(fault).__name__ for fault in run.swarm.faults),
        "rounds": Counter("failed" if o.reason else "applied" for o in run.record.outcomes),
        "shards reduced": Counter(reduced),
        "elements": Counter(mean_schedules.accounts(run)),
    }
    return counts, list(mean_schedules.violations(run))


def _pairs(seed: int, shuffled: bool) -> tuple[Counts, list[str]]:
    world = pair_schedules.random_world(seed, shuffled=shuffled).play()
    sizes = (f"of {len(group)}" for group, _ in pair_schedules.undisturbed(world))
    counts = {
        "faults": Counter(type(fault).__name__ for fault in world.faults),
        "rounds": pair_schedules.endings(world),
        "undisturbed groups": Counter(sizes),
        "two generals": Counter(cause for _, cause in pair_schedules.left_behind(world)),
    }
    return counts, pair_schedules.violations(world)


if __name__ == "__main__":
    raise SystemExit(main())
