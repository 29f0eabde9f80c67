"""The I/O loop's lag while four workers train the default model: p50, p99 and max of each.

    python tests/lab/lag.py [murmur swarm options]

The loop sleeps 10 ms again and again; the lag is how much later it wakes. It is what other peers
feel of this process's training load.
"""

import sys

from tests.support.swarm_runs import run_swarm


def main() -> None:
    report = run_swarm("--steps", "120", *sys.argv[1:])
    print(f"I/O loop while training, {report['workers']} workers, {report['preset']}")
    for peer in report["peers"]:
        lag = peer["loop_lag_ms"]
        print(
            f"  {peer['peer']}: p50 {lag['p50']:.1f} ms, p99 {lag['p99']:.1f} ms, "
            f"max {lag['max']:.1f} ms"
        )


if __name__ == "__main__":
    main()
