"""How much of a slow link the exchange uses, beside what iperf3 gets out of the same link.

    python -m tests.lab link-use [--rates 20 100] [--rounds 6] [--seconds 6]

Two network namespaces (root), each behind a link of that rate both ways. iperf3 sends one way,
then both ways at once. Then two peers with the real node, transport and rounds exchange fp32 with
nothing to compute, each round once both ways over the link: payload over the time from handing
values over to having the mean, the median of the rounds after the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.worker.identity import Authority, Identity, Role
from tests.support.namespaces import NamespaceHost, Namespaces, NoNamespaces

_PORT = 7700
_ROUND_S = 3.0  # about, each
TARGET = 0.9


class _Print:
    """Stands in for the queue that `exchange.peer` reports to."""

    @staticmethod
    def put(report: str) -> None:
        print(report, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 100.0], help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=6, help="of each iperf3 run")
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        return _peer(**options.peer)
    try:
        shares = [measure(rate, options.rounds, options.seconds) for rate in options.rates]
    except NoNamespaces as reason:
        raise SystemExit(f"link-use: {reason}") from reason
    print(f"least: {min(shares):.3f} of iperf3; wanted: {TARGET}")
    return 0 if min(shares) >= TARGET else 1


def measure(rate_mbps: float, rounds: int, seconds: int) -> float:
    """The exchange's goodput as a part of iperf3's with both directions busy."""
    with Namespaces(2, Link(rate_mbps=rate_mbps)) as network:
        one, other = network.members
        ahead = iperf3(one, other, seconds)["sum_received"]
        both = iperf3(one, other, seconds, "--bidir")
        ways = [
            both[key]["bits_per_second"] / 1e6
            for key in ("sum_received", "sum_received_bidir_reverse")
        ]
        before = network.counters()[0].sent_bytes
        rates, payload = exchange(network.members, rate_mbps, rounds)
        frames = network.counters()[0].sent_bytes - before
    one_way = ahead["bits_per_second"] / 1e6
    ours, theirs = statistics.median(rates), statistics.mean(ways)
    print(
        f"{rate_mbps:g} Mbit/s: iperf3 {one_way:.2f} one way, {ways[0]:.2f} and {ways[1]:.2f} both "
        f"ways at once; exchange {ours:.2f} each way at once (rounds {min(rates):.2f} to "
        f"{max(rates):.2f}), {ours / theirs:.3f} of iperf3 both ways, {ours / one_way:.3f} of one "
        f"way; on the wire {frames / payload:.3f} bytes per byte of payload",
        flush=True,
    )
    return ours / theirs


def iperf3(one: NamespaceHost, other: NamespaceHost, seconds: int, *words: str) -> dict[str, Any]:
    """The summary of a run from one member to another."""
    command = ["iperf3", "--server", "--one-off", "--forceflush"]
    with subprocess.Popen([*other.prefix, *command], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise SystemExit("link-use: iperf3 does not start; is it installed?")
        call = ["iperf3", "--json", "--time", str(seconds), "--client", other.address, *words]
        done = subprocess.run([*one.prefix, *call], check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, Any] = json.loads(done.stdout)["end"]
    return summary


def exchange(
    members: Sequence[NamespaceHost], rate_mbps: float, rounds: int
) -> tuple[list[float], int]:
    """(Mbit/s of payload that a peer sent in each round but the first, bytes of all rounds)."""
    mbytes = max(1, round(rate_mbps / 8 * _ROUND_S))
    reports = in_rounds(members, rounds, mbytes=mbytes, preset="diloco", pause_s=0.0)
    timed = [each for report in reports for each in report[1:]]
    payload = sum(sent for sent, _, _ in reports[0])
    return [sent * 8 / took_s / 1e6 for sent, took_s, _ in timed], payload


def in_rounds(
    members: Sequence[NamespaceHost],
    rounds: int,
    *,
    mbytes: float,
    preset: str,
    pause_s: float,
    certificates: Path | None = None,
) -> list[list[tuple[int, float, float]]]:
    """Of each peer, a process behind each member's link: (payload bytes sent, seconds, seconds
    before it until anchors were there) of one round to open the connections, and of so many more.
    With a folder for their certificates they use mutual TLS.
    """
    if certificates is not None:
        authority = Authority.make(certificates)
        for i in range(len(members)):
            authority.new_identity(Role.PEER, f"p{i}").save(certificates / f"p{i}")
    asked = {
        "addresses": [f"{member.address}:{_PORT}" for member in members],
        "mbytes": mbytes,
        "rounds": rounds + 1,
        "preset": preset,
        "pause_s": pause_s,
        "certificates": None if certificates is None else str(certificates),
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


def _peer(
    *, index: int, addresses: list[str], certificates: str | None = None, **options: Any
) -> int:
    from tests.lab.exchange import peer

    identity = None if certificates is None else Identity.load(Path(certificates) / f"p{index}")
    peer(index, addresses, argparse.Namespace(codec="fp32", **options), _Print(), identity)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
