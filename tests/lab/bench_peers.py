"""Trains the `diloco` preset's model on other systems instead of Murmuration, for `bench`.

Model, samples, inner optimizer and outer settings are those of `murmur swarm --preset diloco` with
as many workers, steps and inner steps. This launcher runs in the project's own environment and
imports no other system: torchft's and hivemind's workers run in `.venv-peers`, which
`make .venv-peers/.ready` makes. PyTorch's DDP is in the project's own, and averages in every step.
Each worker has a network namespace behind a link of its own.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.coordinator.launch import Launch
from tests.support.namespaces import Namespaces
from tests.support.workers import Event, WorkerProcess

KINDS = {"torch-ddp": "torch_ddp", "torchft": "torchft_diloco", "hivemind": "hivemind_averager"}
_ROOT = Path(__file__).resolve().parents[2]
_BIN = _ROOT / ".venv-peers" / "bin"
_MEANS = ("val_loss", "wall_s", "compute_s", "stall_s", "compute_utilization")


def run_peers(
    kind: str, link: Link, logs: Path, patience_s: float, **settings: int
) -> dict[str, Any]:
    """Runs one system's workers to their end, one torch thread each, and returns their report.

    Args:
        logs: a folder for what the processes say.
        settings: workers, steps, a multiple of inner_steps, and seed.

    Raises:
        AssertionError: a process failed or took too long.
        NoNamespaces: there can be no links."""
    workers = settings["workers"]
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    with ExitStack() as stack:
        links = stack.enter_context(Namespaces(workers, link))
        own_cores = Launch.fair_cores(workers)  # as `murmur swarm` shares them out
        python = sys.executable if kind == "torch-ddp" else str(_BIN / "python")
        running = []
        for rank, host in enumerate(links.members):
            cores = ",".join(map(str, own_cores[rank]))
            keep_to = ["taskset", "-c", cores] if cores and shutil.which("taskset") else []
            flags = {**settings, "rank": rank, "address": host.address}
            words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
            module, prefix = f"tests.lab.peers.{KINDS[kind]}", [*host.prefix, *keep_to]
            running.append(WorkerProcess(words, f"w{rank}", [module], prefix, python))
            stack.enter_context(running[-1])
        try:
            results = _train(running, stack, kind, links.host_address, patience_s)
        finally:
            for worker in running:
                worker.end()
                (logs / f"{worker.name}.log").write_text(worker.errors)
    return {**settings, **combine(results)}


def _train(
    workers: list[WorkerProcess], stack: ExitStack, kind: str, beside: str, patience_s: float
) -> list[Event]:
    """Tells each where to begin, and all when; their results.

    Those of torchft begin at a lighthouse. Each other peer is told of all before it, so that all
    are connected from the start. One entry point is not always enough for hivemind: libp2p does not
    spread addresses that are neither private nor public to it (198.18.0.0/15 is such), and then
    finds no way to a peer it knows by name."""
    # It waits for everyone: a quorum of fewer would be a smaller group than the others measure.
    known = [_start_lighthouse(stack, beside, len(workers))] if kind == "torchft" else []
    for worker in workers:
        worker.tell(json.dumps(known))
        if kind != "torchft":
            known += worker.wait_for(lambda e: e["event"] == "listening", "address")["addresses"]
    for worker in workers:
        worker.wait_for(lambda e: e["event"] == "ready", "start")
    for worker in workers:
        worker.tell("go")
    results = [w.wait_for(lambda e: e["event"] == "result", "end", patience_s) for w in workers]
    for worker in workers:  # whoever has ended can serve nobody
        assert worker.process.stdin is not None
        worker.process.stdin.close()
    return results


def _start_lighthouse(stack: ExitStack, address: str, least: int) -> str:
    """Starts torchft's beside the workers and returns its URL; these try again until it listens.

    Args: least: workers of a quorum."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    bind = ["--bind", f"{address}:{port}", "--min_replicas", str(least)]
    process = subprocess.Popen([str(_BIN / "torchft_lighthouse"), *bind])
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"http://{address}:{port}"


def combine(results: Sequence[Event]) -> dict[str, Any]:
    """The results of one run as one report, under murmur's keys where murmur has them.

    Means are over the workers; `rounds_completed` is the most that one of them saw, `rounds_failed`
    the sum, `rounds_partial` the most rounds that were said to be complete though their mean was
    not everybody's. `val_loss_spread` is the largest difference between two workers: 0 or rounding,
    unless a round passed somebody by."""
    losses = [result["val_loss"] for result in results]
    hashes = {(result["anchor_hash"], result["momentum_hash"]) for result in results}
    return {
        "system": results[0]["system"],
        **{key: mean(result[key] for result in results) for key in _MEANS},
        "val_loss_spread": max(losses) - min(losses),
        "rounds_completed": max(result["rounds_completed"] for result in results),
        "rounds_failed": sum(result["rounds_failed"] for result in results),
        "rounds_partial": max(result["rounds_partial"] for result in results),
        "bytes_sent_per_worker": mean(result["bytes_sent"] for result in results),
        "hashes_agree": len(hashes) == 1,
        "peers": list(results),
    }
