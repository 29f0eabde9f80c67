"""NoLoCo's latency model beside the paper's figures: tree over pair, and what blocking costs.

    python tests/bench/pair_latency.py

The first table is the mean time of a tree all-reduce of n peers over that of a pair's exchange, by
the spread (standard deviation over mean) of a message's time. The second is the time of 1,024 peers
of which all wait for all, over that of pairs that wait for each other, by inner steps a round.
Exits with 1 if a figure is more than 3 % from the paper's.

Ref: arXiv:2506.10911.
"""

import numpy as np

from algorithms.latency import MessageTime, StepTime, blocking_ratio, pair_s, tree_s

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

    def entry(ours: float, paper: float) -> str:
        errors.append(ours / paper - 1)
        return f"{ours:8.2f} {paper:8.2f} {100 * errors[-1]:+7.1f}"

    print("a tree all-reduce over a pair's exchange")
    print(f"{'std/t_c':>8}{'peers':>7}{'ours':>9}{'paper':>9}{'error %':>8}")
    for spread, wanted in TREE_OVER_PAIR.items():
        for peers, paper in zip(PEERS, wanted, strict=True):
            print(f"{spread:8.1f}{peers:7d} {entry(tree_over_pair(spread, peers), paper)}")
    print(f"\nall wait for all, over pairs that wait for each other ({BLOCKING_PEERS} peers)")
    print(f"{'inner steps':>15}{'ours':>9}{'paper':>9}{'error %':>8}")
    for inner_steps, paper in BLOCKING.items():
        print(f"{inner_steps:15d} {entry(blocking(inner_steps), paper)}")
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
    """The ratio for the paper's inner step."""
    rng = np.random.default_rng(SEED)
    return blocking_ratio(StepTime(), BLOCKING_PEERS, inner_steps, ROUNDS, rng)


if __name__ == "__main__":
    raise SystemExit(main())
