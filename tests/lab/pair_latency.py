"""NoLoCo's latency model beside figures derived from it: tree over pair, and what blocking costs.

    python tests/lab/pair_latency.py

The first table is the mean time of a tree all-reduce of n peers over that of a pair's exchange, by
the spread (standard deviation over mean) of a message's time. The second is the time of 1,024 peers
of which all wait for all, over that of pairs that wait for each other, by inner steps a round.
Exits with 1 if a figure is more than 3 % from the derived one.

The figures are our own derivation from the paper's model. The paper has curves, and says in words
that a tree costs about log2 n times as much, and that blocking costs about 20 % with 1,024 peers
and 100 inner steps.

Ref: arXiv:2506.10911.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms.link import MessageTime, pair_s, tree_s

Times = NDArray[np.float64]

TOLERANCE = 0.03
SEED = 1
RUNS = 4_000
ROUNDS = 300
BLOCKING_PEERS = 1024

PEERS = (4, 16, 64, 256, 1024)
TREE_OVER_PAIR: dict[float, tuple[float, ...]] = {
    0.0: (2, 4, 6, 8, 10),
    1.0: (2.2, 5.2, 8.7, 12.7, 17.0),
    2.5: (2.5, 6.8, 13.8, 24.0, 38.9),
}
BLOCKING: dict[int, float] = {5: 2.09, 10: 1.74, 25: 1.43, 50: 1.28, 100: 1.20}


def main() -> int:
    """Prints both tables; 1 if any figure is off."""
    errors: list[float] = []

    def entry(ours: float, derived: float) -> str:
        errors.append(ours / derived - 1)
        return f"{ours:9.2f} {derived:8.2f} {100 * errors[-1]:+7.1f}"

    print("a tree all-reduce over a pair's exchange")
    print(f"{'std/t_c':>8}{'peers':>7}{'simulated':>10}{'derived':>9}{'error %':>8}")
    for spread, wanted in TREE_OVER_PAIR.items():
        for peers, derived in zip(PEERS, wanted, strict=True):
            print(f"{spread:8.1f}{peers:7d} {entry(tree_over_pair(spread, peers), derived)}")
    print(f"\nall wait for all, over pairs that wait for each other ({BLOCKING_PEERS} peers)")
    print(f"{'inner steps':>15}{'simulated':>10}{'derived':>9}{'error %':>8}")
    for inner_steps, derived in BLOCKING.items():
        print(f"{inner_steps:15d} {entry(blocking(inner_steps), derived)}")
    within = sum(abs(error) <= TOLERANCE for error in errors)
    print(
        f"\n{within} of {len(errors)} within {100 * TOLERANCE:.0f} %; "
        f"largest error {100 * max(map(abs, errors)):.1f} %"
    )
    return 0 if within == len(errors) else 1


def tree_over_pair(spread: float, peers: int, runs: int = RUNS) -> float:
    """The mean of so many simulated all-reduces over the closed form of a pair."""
    message = MessageTime(spread=spread)
    times_s = tree_s(message, peers, runs, np.random.default_rng(SEED))
    return float(times_s.mean()) / pair_s(message)


def blocking(inner_steps: int) -> float:
    """The ratio for the inner step of the paper: its sigma^2 is 0.5."""
    rng = np.random.default_rng(SEED)
    return blocking_ratio(StepTime(), BLOCKING_PEERS, inner_steps, ROUNDS, rng)


@dataclass(frozen=True)
class StepTime:
    """The time of one inner step, LogNormal(mu, variance), by the moments of its logarithm."""

    mu: float = 1.0
    variance: float = 0.5

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Times:
        """Independent times in seconds."""
        return rng.lognormal(self.mu, math.sqrt(self.variance), shape)


def blocking_ratio(
    step: StepTime, peers: int, inner_steps: int, rounds: int, rng: np.random.Generator
) -> float:
    """How much longer training takes when all wait for all than when each waits for a partner.

    Messages take no time. Each round every peer takes its inner steps; then either nobody goes on
    before the slowest of all has arrived, or each before its partner of a random pairing has,
    whose lag it thereby hands on. Both see the same step times. With an odd count one peer waits
    for nobody.

    Returns:
        The ratio of the two times at which the last peer ends its last round. Beyond a hundred
        rounds or so it no longer depends on their number.
    """
    all_wait_s = 0.0
    clock_s: Times = np.zeros(peers)
    for _ in range(rounds):
        taken_s = step.draw((inner_steps, peers), rng).sum(axis=0)
        all_wait_s += float(taken_s.max())
        clock_s = clock_s + taken_s
        order = rng.permutation(peers)
        left, right = order[: peers // 2], order[peers // 2 : peers // 2 * 2]
        clock_s[left] = clock_s[right] = np.maximum(clock_s[left], clock_s[right])
    return all_wait_s / float(clock_s.max())


if __name__ == "__main__":
    raise SystemExit(main())
