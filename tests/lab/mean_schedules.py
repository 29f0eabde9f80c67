"""Many random schedules of leaderless means: nothing may be applied that must not.

    python -m tests.lab mean-schedules [--schedules 100000] [--processes 2] [--seed 0] [--keep]
                                         [--shuffled]

2 to 5 peers hold rounds in the product's simulator, with the live code; streams break, links are
cut, peers die, freeze, come late, and take each other for dead. With `--shuffled` what is ready at
one time runs in an order that the seed draws. Prints how the
rounds ended, how often two reductions of one shard were applied (which anti-entropy repairs), and
what was violated, such as a contribution that counts twice. Fails on any violation.

It also follows every element of every pseudo-gradient: each is in the anchor or kept in the local
parameters, `once`. `again` is one that a peer keeps though it counts, `other reduction` one that
stands nowhere, since its shard was reduced twice. With `--keep` replicas send one bit of each and
keep the rest; then every element must stand once.
"""

import argparse
import multiprocessing
import time
from collections import Counter
from functools import partial

import torch

from tests.support.mean_schedules import accounts, random_run, violations

SHOWN = 20
AT_ONCE = 250

Counts = dict[str, Counter[str]]


def main() -> int:
    """Prints the counts; 1 if something was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help='merge = "keep", in one bit')
    parser.add_argument("--shuffled", action="store_true", help="the ready queue, by the seed")
    options = parser.parse_args()
    began, stop = time.monotonic(), options.seed + options.schedules
    parts = [range(at, min(at + AT_ONCE, stop)) for at in range(options.seed, stop, AT_ONCE)]
    total: Counts = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        work = partial(play, keep=options.keep, shuffled=options.shuffled)
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


def play(seeds: range, keep: bool, shuffled: bool) -> Counts:
    """Some of the schedules."""
    torch.set_num_threads(1)
    titles = ("faults", "rounds", "shards", "elements", "violations")
    counts: Counts = {title: Counter() for title in titles}
    for seed in seeds:
        run = random_run(seed, *(("sign", "keep") if keep else ()), shuffled=shuffled)
        counts["faults"].update(type(fault).__name__ for fault in run.swarm.faults)
        for outcome in run.record.outcomes:
            counts["rounds"]["failed" if outcome.reason else "applied"] += 1
        for found in run.applied().values():
            counts["shards"]["reduced twice" if len(found) > 1 else "reduced once"] += 1
        counts["elements"].update(accounts(run))
        for text in violations(run):
            counts["violations"][text.split(":")[0]] += 1
            print(f"seed {seed}: {text}", flush=True)
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
