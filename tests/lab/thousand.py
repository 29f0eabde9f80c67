"""A thousand peers on a virtual clock: bytes a second each, and what is left when half are killed.

    python -m tests.lab thousand [--peers 1000] [--seconds 30] [--round-s 60] [--plain]

Real membership machines with the default configuration; messages take 5 to 50 ms. Everyone trains
and says so twice a second; members travel signed, as in an encrypted run, unless --plain. Then half
of the peers are killed at once. Two peers are connected where one that lives knows the other alive:
the largest component is the share of those that live. Fails where a peer sends more than 2 kB/s in
the mean, where a component has less than 99.9 %, or a live peer was declared dead.
"""

import argparse
import statistics
import time

from murmuration.worker.membership import Health
from tests.unit.worker.membership.simulation import Simulation
from tests.unit.worker.membership.test_dissemination_swarms import PUBLISH_S, train

MOST_BYTES_A_S, LEAST_SHARE = 2000, 0.999
SETTLE_S = 6.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="that bytes are counted for")
    parser.add_argument("--round-s", type=float, default=60.0, help="new digests so often")
    parser.add_argument("--after-s", type=float, default=30.0, help="from the kill on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without signatures")
    options = parser.parse_args()
    began, steps = time.monotonic(), round(options.round_s / PUBLISH_S)
    swarm = Simulation(options.peers, options.seed, signed=not options.plain)
    train(swarm, SETTLE_S, steps)
    sent = swarm.sent_bytes if options.plain else swarm.signed_bytes
    before = dict(sent)
    train(swarm, options.seconds, steps)
    rates = [(sent[name] - before[name]) / options.seconds for name in swarm.names]
    mean = statistics.mean(rates)
    print(
        f"{options.peers} peers, a round every {options.round_s:g} s: {mean:.0f} B/s a peer in the "
        f"mean, {max(rates):.0f} at most; took {time.monotonic() - began:.0f} s",
        flush=True,
    )
    for name in swarm.names[::2]:
        swarm.crash(name)
    shares = []
    while (at := swarm.now) < SETTLE_S + options.seconds + options.after_s:
        swarm.run(5.0)
        shares.append(largest_component(swarm))
        known = known_dead(swarm)
        print(
            f"  {swarm.now - at:.0f} s on: {shares[-1]:.2%} connected, {known:.1%} of deaths known"
        )
    living = set(swarm.names[1::2])
    wrong = {change.peer for change in swarm.deaths()} & living
    print(
        f"half of them killed: the largest component is {min(shares):.2%} of the rest; "
        f"{len(wrong)} live peers declared dead; {time.monotonic() - began:.0f} s in all"
    )
    return 0 if mean <= MOST_BYTES_A_S and min(shares) >= LEAST_SHARE and not wrong else 1


def alive_views(swarm: Simulation) -> dict[str, set[str]]:
    """For each peer that runs, whom it holds to be alive."""
    running = [name for name, process in swarm.processes.items() if process.running]
    return {
        name: {each.peer for each in swarm.members(name) if each.health is Health.ALIVE}
        for name in running
    }


def largest_component(swarm: Simulation) -> float:
    """Its share of the peers that run."""
    views = alive_views(swarm)
    for name, known in list(views.items()):
        for other in known & views.keys():
            views[other].add(name)
    left, largest = set(views), 0
    while left:
        reached, border = set(), {next(iter(left))}
        while border:
            reached |= border
            border = set().union(*(views[name] for name in border)) & left - reached
        largest = max(largest, len(reached))
        left -= reached
    return largest / len(views)


def known_dead(swarm: Simulation) -> float:
    """Of all pairs of one that runs and one that does not: where the first knows."""
    views = alive_views(swarm)
    gone = [name for name, process in swarm.processes.items() if not process.running]
    known = sum(peer not in view for view in views.values() for peer in gone)
    return known / max(1, len(views) * len(gone))


if __name__ == "__main__":
    raise SystemExit(main())
