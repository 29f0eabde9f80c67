"""Bytes that each worker sends and receives per round, for 2 to 5 workers.

    python tests/bench/traffic.py [--rounds 6] [--codec fp32]

The wanted figure is 2 (n-1)/n of the encoded model in each direction. Counted twice: by the
transport (messages with their gRPC and HTTP/2 framing, rounds only), and by the kernel for the
whole process (TCP payload of every connection, gossip and all else included).
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from tests.support.gate import gate
from tests.support.workers import SMALL, running_swarm, settings_of

_COUNTERS = re.compile(r"bytes_sent:(\d+)|bytes_received:(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--codec", default="fp32")
    options = parser.parse_args()
    worst = 0.0
    for count in (2, 3, 4, 5):
        worst = max(worst, measure(count, options.rounds, options.codec))
    print(f"largest difference from 2(n-1)/n: {100 * worst:.2f} %")
    return 0 if worst <= 0.02 else 1


def measure(count: int, rounds: int, codec: str) -> float:
    """Trains `count` workers; returns the largest relative difference of any of them."""
    inner = 10
    model = [*SMALL[:4], "--set", "task.model=small"]  # rounds of a size that matters
    settings = settings_of(
        exchange__compression="never",
        run__steps=rounds * inner + inner - 1,
        diloco__inner_steps=inner,
        diloco__codec=codec,
        diloco__reduction_codec=codec,
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        held = gate(Path(folder), rounds * inner + 2)
        with running_swarm(count, Path(folder), *model, *settings, *held.settings) as swarm:
            swarm.start_all()
            for worker in swarm.workers.values():
                worker.wait_for_round(rounds - 1)
            kernel = {
                name: kernel_bytes(worker.process.pid) for name, worker in swarm.workers.items()
            }
            status = {name: swarm.status(name)["traffic"] for name in swarm.names}
            with held.opened():
                results = swarm.wait()
    for name, result in results.items():
        wanted = 2 * (count - 1) / count * result["payload_bytes_per_round"]
        sent = status[name]["sent_by_method"]["Data/Exchange"] / rounds
        received = status[name]["received_by_method"]["Data/Exchange"] / rounds
        worst = max(worst, abs(sent / wanted - 1), abs(received / wanted - 1))
        kernel_sent, kernel_received = (value / rounds for value in kernel[name])
        print(
            f"n={count} {name}: wanted {wanted / 1e6:.3f} MB a round; sent {sent / wanted:.4f}, "
            f"received {received / wanted:.4f} of it; kernel, all traffic: "
            f"{kernel_sent / wanted:.4f} and {kernel_received / wanted:.4f}",
            flush=True,
        )
    return worst


def kernel_bytes(pid: int) -> tuple[int, int]:
    """(sent, received) TCP payload bytes of a process's open connections."""
    listing = subprocess.run(
        ["ss", "-tinpOH"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    sent = received = 0
    for line in listing.splitlines():
        if f"pid={pid}," in line:
            for out, into in _COUNTERS.findall(line):
                sent, received = sent + int(out or 0), received + int(into or 0)
    return sent, received


if __name__ == "__main__":
    raise SystemExit(main())
