"""Many random schedules of rounds in pairs and small groups: nothing may be applied that must not.

    python tests/bench/pair_schedules.py [--schedules 100000] [--seed 0]

2 to 9 peers in groups of 2 to 4 hold rounds on a virtual clock, with the state machine of the
daemon; streams break, links are cut, peers die, freeze, come late, join, and take each other for
dead. Prints what went wrong, how the rounds ended, and how often a peer gave up a round that
another has applied (the two generals), by what excuses it: the word that was missing was lost with
a broken stream, or somebody of the group had died or was frozen then. Fails on any violation, such
as a peer left behind without an excuse.
"""

import argparse
import time
from collections import Counter

from tests.protocol.meeting_checks import left_behind, violations
from tests.protocol.meeting_parts import random_faults
from tests.protocol.meeting_schedules import MeetingWorld, random_world

SHOWN = 20


def main() -> int:
    """Prints the counts; 1 if something was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.process_time()
    faults: Counter[str] = Counter()
    rounds: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    violated: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.schedules):
        world = random_world(seed)
        world.play()
        faults.update(touch.kind for touch in world.touches)
        faults["late"] += len(world.late_s)
        faults["joiner"] += random_faults(seed).joiners if len(world.peers) > 2 else 0
        rounds.update(ending(world))
        causes.update(each.cause for each in left_behind(world))
        for text in violations(world):
            violated[text.split(":")[0]] += 1
            if violated.total() <= SHOWN:
                print(f"seed {seed}: {text}", flush=True)
    took_s = time.process_time() - began
    print(f"{options.schedules} schedules from seed {options.seed} in {took_s:.0f} s of CPU time")
    for title, counts in (
        ("faults", faults),
        ("rounds", rounds),
        ("two generals", causes),
        ("violations", violated),
    ):
        each = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        print(f"{title}: {counts.total()}" + (f" ({each})" if each else ""))
    return 1 if violated else 0


def ending(world: MeetingWorld) -> Counter[str]:
    """How the rounds of a schedule ended, each counted once for every peer in it."""
    counts: Counter[str] = Counter()
    for part in world.attendances:
        alone = len(part.group) == 1
        counts["alone" if alone else "applied" if part.succeeded else "failed"] += 1
        counts["cut off by death"] += part.ended_at is None
    counts["failed"] -= counts["cut off by death"]
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
