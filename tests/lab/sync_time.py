"""How long a round takes as the swarm grows: `noloco` beside `diloco`, on links of one speed.

    python -m tests.lab sync-time [--peers 2 4 8] [--mbps 20] [--mbytes 1.5] [--rounds 8]

Every peer is a process with the real node and rounds behind a link of its own (root). Before each
round there is a pause as long as 20 inner steps. Printed: the median of seconds from handing values
over to having the mean, and of pairs how long the anchors of their next group take. Exits with 1
when a round of `noloco` takes the largest swarm more than 1.15 times as long as the smallest.
"""

import argparse
import statistics

from murmuration.algorithms.link import Link
from tests.lab.exchange import Exchanged, run
from tests.support.namespaces import Namespaces, NoNamespaces

TARGET = 1.15
_PORT = 7700


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mbps", type=float, default=20.0)
    parser.add_argument("--mbytes", type=float, default=1.5, help="of fp32; the default model's")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=1.2)
    options = parser.parse_args()
    medians: dict[tuple[str, int], float] = {}
    print(
        f"| peers on {options.mbps:g} Mbit/s | diloco | noloco | then its next group's anchors |\n"
        "| ---: | ---: | ---: | ---: |"
    )
    for peers in options.peers:
        for preset in ("diloco", "noloco"):
            try:
                with Namespaces(peers, Link(rate_mbps=options.mbps)) as network:
                    given = Exchanged(
                        addresses=[f"{member.address}:{_PORT}" for member in network.members],
                        mbytes=options.mbytes,
                        rounds=options.rounds + 1,
                        preset=preset,
                        pause_s=options.pause_s,
                    )
                    reports = run(given, [member.prefix for member in network.members])
            except NoNamespaces as reason:
                raise SystemExit(f"sync_time: {reason}") from reason
            rounds = [round_ for report in reports for round_ in report]
            medians[preset, peers] = statistics.median(took_s for _, took_s, _ in rounds)
            medians["ahead", peers] = statistics.median(ahead_s for _, _, ahead_s in rounds)
        times = [f"{medians[each, peers]:.2f} s" for each in ("diloco", "noloco", "ahead")]
        print(f"| {peers} | {' | '.join(times)} |", flush=True)
    least, most = min(options.peers), max(options.peers)
    growth = {p: medians[p, most] / medians[p, least] for p in ("diloco", "noloco")}
    print(
        f"{most} to {least} peers: diloco {growth['diloco']:.2f}, noloco {growth['noloco']:.2f}; "
        f"wanted: at most {TARGET}"
    )
    return 0 if growth["noloco"] <= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
