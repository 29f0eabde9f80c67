"""Trains the `diloco` preset's model on other systems instead of Murmuration, and reports.

    python -m tests.lab bench-peers torch-ddp|torchft|hivemind [--workers 4] [--steps 200]
        [--inner-steps 20] [--seed 0] [--mbps RATE] [--json FILE]

Model, samples, inner optimizer and outer settings are those of `murmur swarm --preset diloco` with
as many workers, steps and inner steps. This launcher runs in the project's own environment and
imports no other system: torchft's and hivemind's workers run in `.venv-peers`, which
`make .venv-peers/.ready` makes. PyTorch's DDP is in the project's own, and averages in every step.

`--mbps` gives each worker a network namespace behind a link of that rate both ways (needs root). On
loopback they share one byte counter, and with it whatever else uses loopback.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.coordinator.launch import Launch
from tests.support.namespaces import NamespaceHost, Namespaces, NoNamespaces
from tests.support.workers import Event, WorkerProcess

Report = dict[str, Any]
KINDS = {"torch-ddp": "torch_ddp", "torchft": "torchft_diloco", "hivemind": "hivemind_averager"}
OWN = ("torch-ddp",)  # systems that the project's own environment has
_ROOT = Path(__file__).resolve().parents[2]
_BIN = _ROOT / ".venv-peers" / "bin"
_MOST_S = 3600.0
_MEANS = ("val_loss", "wall_s", "compute_s", "stall_s", "compute_utilization")
_LOOPBACK = NamespaceHost("", "127.0.0.1", [])


def run_peers(options: argparse.Namespace) -> Report:
    """Runs one system's workers to their end, one torch thread each, and returns their report.

    Raises:
        ValueError: settings that do not fit one another.
        AssertionError: a process failed or took too long.
        NoNamespaces: there can be no links.
    """
    _check(options)
    kind, workers = options.kind, options.workers
    settings = {
        name: getattr(options, name) for name in ("workers", "steps", "inner_steps", "seed")
    }
    started = time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    with ExitStack() as stack:
        hosts, beside = [_LOOPBACK] * workers, _LOOPBACK.address
        if options.mbps:
            links = stack.enter_context(Namespaces(workers, Link(rate_mbps=options.mbps)))
            hosts, beside = links.members, links.host_address
        names = [f"w{rank}" for rank in range(workers)]
        own_cores = Launch.fair_cores(workers)  # as `murmur swarm` shares them out
        python = sys.executable if kind in OWN else str(_BIN / "python")
        running = {}
        for rank, (name, host) in enumerate(zip(names, hosts, strict=True)):
            cores = ",".join(map(str, own_cores[rank]))
            keep_to = ["taskset", "-c", cores] if cores and shutil.which("taskset") else []
            flags = {**settings, "rank": rank, "address": host.address}
            words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
            module, prefix = f"tests.lab.peers.{KINDS[kind]}", [*host.prefix, *keep_to]
            running[name] = WorkerProcess(words, name, [module], prefix, python)
            stack.enter_context(running[name])
        try:
            results = _train(list(running.values()), stack, kind, beside)
        finally:
            for name, worker in running.items() if options.logs else ():
                options.logs.mkdir(parents=True, exist_ok=True)
                worker.end()
                (options.logs / f"{name}.log").write_text(worker.errors)
    report = combine({"preset": kind, **settings}, results)
    return {**report, "elapsed_s": round(time.monotonic() - started, 3)}


def _train(workers: list[WorkerProcess], stack: ExitStack, kind: str, beside: str) -> list[Event]:
    """Tells each where to begin, and all when; their results.

    Those of torchft begin at a lighthouse. Each other peer is told of all before it, so that all
    are connected from the start. One entry point is not always enough for hivemind: libp2p does not
    spread addresses that are neither private nor public to it (198.18.0.0/15 is such), and then
    finds no way to a peer it knows by name.
    """
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
    patience = {"patience_s": _MOST_S}
    results = [w.wait_for(lambda e: e["event"] == "result", "end", **patience) for w in workers]
    for worker in workers:  # whoever has ended can serve nobody
        assert worker.process.stdin is not None
        worker.process.stdin.close()
    return results


def _check(options: argparse.Namespace) -> None:
    kind, steps, inner_steps = options.kind, options.steps, options.inner_steps
    for problem, holds in (
        (f"workers is {options.workers}; an exchange takes at least 2", options.workers < 2),
        (
            f"steps ({steps}) must be a multiple of inner_steps ({inner_steps})",
            inner_steps < 1 or steps < 1 or steps % inner_steps,
        ),
        (f"{kind} exchanges in every step; use --inner-steps 1", kind in OWN and inner_steps != 1),
        (
            f"{_BIN.parent} is missing: `make .venv-peers/.ready` makes it",
            kind not in OWN and not (_BIN / "python").exists(),
        ),
    ):
        if holds:
            raise ValueError(problem)


def _start_lighthouse(stack: ExitStack, address: str, least: int) -> str:
    """Starts torchft's beside the workers and returns its URL; these try again until it listens.

    Args: least: workers of a quorum.
    """
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    bind = ["--bind", f"{address}:{port}", "--min_replicas", str(least)]
    command = [str(_BIN / "torchft_lighthouse"), *bind]
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"http://{address}:{port}"


def combine(settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Report:
    """The results of one run as one report, under murmur's keys where murmur has them.

    Means are over the workers; `rounds_completed` is the most that one of them saw, `rounds_failed`
    the sum, `rounds_partial` the most rounds that were said to be complete though their mean was
    not everybody's. `stall_per_round_s` is the mean over all rounds and workers, the first round
    with its connecting included, `stall_per_round_median_s` their median. `val_loss_spread` is the
    largest difference between two workers: 0 or rounding, unless a round passed somebody by.
    """
    workers, steps = len(results), settings["steps"]
    params = results[0]["params"]
    sent = mean(result["bytes_sent"] for result in results)
    ddp = 2 * (workers - 1) / workers * 4 * params * steps
    stalls_s = [stall_s for result in results for stall_s in result["stalls_s"]]
    losses = [result["val_loss"] for result in results]
    hashes = {(result["anchor_hash"], result["momentum_hash"]) for result in results}
    return {
        **settings,
        "system": results[0]["system"],
        "params": params,
        **{key: mean(result[key] for result in results) for key in _MEANS},
        "val_loss_spread": max(losses) - min(losses),
        "stall_per_round_s": mean(stalls_s) if stalls_s else 0.0,
        "stall_per_round_median_s": median(stalls_s) if stalls_s else 0.0,
        "rounds_completed": max(result["rounds_completed"] for result in results),
        "rounds_failed": sum(result["rounds_failed"] for result in results),
        "rounds_partial": max(result["rounds_partial"] for result in results),
        "bytes_sent_per_worker": sent,
        "bytes_received_per_worker": mean(result["bytes_received"] for result in results),
        "bytes_counted_on": sorted({result["bytes_counted_on"] for result in results}),
        "ddp_bytes_per_worker": round(ddp),
        "bytes_ratio": ddp / sent if sent else None,
        "hashes_agree": len(hashes) == 1,
        "peers": list(results),
    }


def main() -> int:
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mbps", type=float, help="a link per worker, of this rate both ways")
    parser.add_argument("--logs", type=Path, help="keep what the processes say in this folder")
    parser.add_argument("--json", type=Path, help="write the report with every worker's part here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        report = run_peers(options)
    except (ValueError, AssertionError, NoNamespaces) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "peers"}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
