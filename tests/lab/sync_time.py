"""How long a round takes as the swarm grows: `noloco` beside `diloco`, on links of one speed.

    python -m tests.lab sync-time [--peers 2 4 8] [--mbps 20] [--mbytes 1.5] [--rounds 8]

Every peer is a process with the real node, transport and rounds, in a network namespace behind a
link of its own (root); nothing trains, but before each round there is a pause as long as 20 inner
steps of the default model. Printed: seconds from handing the values over to having the mean, the
median of all peers' rounds after the first; and of pairs, which wait for the anchors of their next
group before they compute, how long that takes: no time where there is only one pair, whose anchors
are the same. Exits with 1 when a round of `noloco` takes the largest swarm more than 1.15 times as
long as the smallest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from murmuration.algorithms.link import Link
from tests.lab.exchange import peer
from tests.support.namespaces import NamespaceHost, Namespaces, NoNamespaces

TARGET = 1.15
_PORT = 7700


class _Print:
    """Stands in for the queue that `exchange.peer` reports to."""

    @staticmethod
    def put(report: str) -> None:
        print(report, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mbps", type=float, default=20.0)
    parser.add_argument("--mbytes", type=float, default=1.5, help="of fp32; the default model's")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=1.2)
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        return _peer(**options.peer)
    medians: dict[tuple[str, int], float] = {}
    print(
        f"| peers on {options.mbps:g} Mbit/s | diloco | noloco | then its next group's anchors |\n"
        "| ---: | ---: | ---: | ---: |"
    )
    for peers in options.peers:
        for preset in ("diloco", "noloco"):
            try:
                with Namespaces(peers, Link(rate_mbps=options.mbps)) as network:
                    reports = in_rounds(
                        network.members,
                        options.rounds,
                        mbytes=options.mbytes,
                        preset=preset,
                        pause_s=options.pause_s,
                    )
            except NoNamespaces as reason:
                raise SystemExit(f"sync_time: {reason}") from reason
            rounds = [round_ for report in reports for round_ in report[1:]]
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


def in_rounds(
    members: Sequence[NamespaceHost],
    rounds: int,
    *,
    mbytes: float,
    preset: str,
    pause_s: float,
) -> list[list[tuple[int, float, float]]]:
    """Of each peer, a process behind each member's link: (payload bytes sent, seconds, seconds
    before it until anchors were there) of one round to open the connections, and of so many more.
    """
    asked = {
        "addresses": [f"{member.address}:{_PORT}" for member in members],
        "mbytes": mbytes,
        "rounds": rounds + 1,
        "preset": preset,
        "pause_s": pause_s,
    }
    peers = [
        subprocess.Popen(
            [*member.prefix, sys.executable, __file__, "--peer", json.dumps({**asked, "index": i})],
            env={**os.environ, "PYTHONPATH": "."},
            stdin=subprocess.PIPE,  # held open: a peer stays until it is told to go
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, member in enumerate(members)
    ]
    try:
        reports = []
        for peer in peers:
            assert peer.stdout is not None
            reports.append(json.loads(peer.stdout.readline() or '{"rounds": []}'))
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
    if any(len(report["rounds"]) != rounds + 1 for report in reports):
        raise SystemExit("a peer has ended early")
    return [report["rounds"] for report in reports]


def _peer(*, index: int, addresses: list[str], **options: Any) -> int:
    peer(index, addresses, argparse.Namespace(codec="fp32", **options), _Print())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
