"""Trains the `diloco` preset's model on other systems instead of Murmuration, and reports.

    python -m tests.lab bench-peers torch-ddp|torchft|hivemind [--workers 4] [--steps 200]
        [--inner-steps 20] [--seed 0] [--fp 32|16] [--json FILE]
        [--mbps RATE | [--prefix 'ip netns exec NS0' --address 10.0.0.1]...]

Model, samples, inner optimizer and outer settings are those of `murmur swarm --preset diloco` with
as many workers, steps and inner steps. This launcher runs in the project's own environment and
imports no other system: torchft's and hivemind's workers run in `.venv-peers`, which
`make .venv-peers/.ready` makes. PyTorch's DDP is in the project's own, and averages in every step.

On loopback the workers share one byte counter, and with it whatever else uses loopback: exact
figures of bytes take a network namespace per worker. `--mbps` makes such, each behind a link of
that rate both ways (needs root); `--prefix` and `--address`, once per worker, name ready ones.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from murmuration.algorithms.link import Link
from murmuration.coordinator.launch import Launch
from tests.lab.peers.processes import Children, PeersFailed, children
from tests.lab.peers.report import Report, combine
from tests.support.namespaces import Namespaces, NoNamespaces

KINDS = {"torch-ddp": "torch_ddp", "torchft": "torchft_diloco", "hivemind": "hivemind_averager"}
OWN = ("torch-ddp",)  # systems that the project's own environment has
_ROOT = Path(__file__).resolve().parents[2]
_BIN = _ROOT / ".venv-peers" / "bin"
_START_S = 180.0
_LIGHTHOUSE = "lighthouse"


def run_peers(
    kind: str,
    workers: int,
    steps: int,
    inner_steps: int,
    seed: int = 0,
    prefixes: Sequence[str] = (),
    addresses: Sequence[str] = (),
    *,
    fp: int = 32,
    lighthouse_address: str | None = None,
    logs: Path | None = None,
    timeout_s: float = 3600.0,
) -> Report:
    """Runs one system's workers to their end and returns their report (`report.combine`).

    Args:
        kind: one of `KINDS`.
        workers: processes, one torch thread each.
        steps: inner steps, a multiple of `inner_steps`.
        prefixes: a command prefix per worker, `ip netns exec NAME`, or none at all.
        addresses: the IPv4 address of each worker, or none at all: loopback.
        fp: bits of an exchanged value: 32, or with hivemind 16.
        lighthouse_address: where torchft's lighthouse listens, in this process's own network
            namespace; by default it runs beside the first worker, behind the same prefix.
        logs: a folder for what each process writes to stderr; by default that is dropped.

    Raises:
        ValueError: settings that do not fit one another.
        PeersFailed: a process failed or took too long.
    """
    prefixes = list(prefixes) or [""] * workers
    own_cores = Launch.fair_cores(workers)  # as `murmur swarm` shares them out
    addresses = list(addresses) or ["127.0.0.1"] * workers
    _check(kind, workers, steps, inner_steps, fp, prefixes, addresses)
    settings = {
        "preset": kind,
        "workers": workers,
        "steps": steps,
        "inner_steps": inner_steps,
        "seed": seed,
        "fp": fp,
    }
    started = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        running = stack.enter_context(children(folder, _ROOT, env))

        names = [f"w{rank}" for rank in range(workers)]
        for rank, name in enumerate(names):
            command = _worker_command(kind, rank, settings, addresses[rank])
            cores = ",".join(map(str, own_cores[rank]))
            keep_to = ["taskset", "-c", cores] if cores and shutil.which("taskset") else []
            running.start(name, [*shlex.split(prefixes[rank]), *keep_to, *command])
        if kind == "torchft":
            prefix = "" if lighthouse_address else prefixes[0]
            url = _start_lighthouse(running, prefix, lighthouse_address or addresses[0], workers)
            running.tell(names, json.dumps([url]))
        else:
            _introduce(running, names)
        running.wait_for("ready", names, _START_S)
        running.tell(names, "go")
        results = running.wait_for("result", names, timeout_s)
        running.dismiss(names)
    report = combine(settings, [results[name] for name in names])
    return {**report, "elapsed_s": round(time.monotonic() - started, 3)}


def _worker_command(
    kind: str, rank: int, settings: Mapping[str, object], address: str
) -> list[str]:
    numbers = ("workers", "steps", "inner_steps", "seed", "fp")
    flags = [f"--{name.replace('_', '-')}={settings[name]}" for name in numbers]
    module = f"tests.lab.peers.{KINDS[kind]}"
    python = sys.executable if kind in OWN else str(_BIN / "python")
    return [python, "-m", module, f"--rank={rank}", f"--address={address}", *flags]


def _introduce(running: Children, names: Sequence[str]) -> None:
    """Tells each peer of all before it, so that all are connected from the start.

    One entry point is not always enough for hivemind: libp2p does not spread addresses that are
    neither private nor public to it (198.18.0.0/15 is such), and then finds no way to a peer it
    knows by name.
    """
    known: list[str] = []
    for name in names:
        running.tell([name], json.dumps(known))
        known += running.wait_for("listening", [name], _START_S)[name]["addresses"]


def _check(
    kind: str,
    workers: int,
    steps: int,
    inner_steps: int,
    fp: int,
    prefixes: Sequence[str],
    addresses: Sequence[str],
) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown system {kind!r}; choose from {', '.join(KINDS)}")
    if not len(prefixes) == len(addresses) == workers:
        raise ValueError(f"give a prefix and an address to each of the {workers} workers, or none")
    if workers < 2:
        raise ValueError(f"workers is {workers}; an exchange takes at least 2")
    if inner_steps < 1 or steps < 1 or steps % inner_steps:
        raise ValueError(f"steps ({steps}) must be a multiple of inner_steps ({inner_steps})")
    if fp != 32 and (kind, fp) != ("hivemind", 16):
        raise ValueError(f"{kind} exchanges no {fp}-bit values on a CPU; use --fp 32")
    if kind in OWN and inner_steps != 1:
        raise ValueError(f"{kind} exchanges in every step; use --inner-steps 1")
    if kind not in OWN and not (_BIN / "python").exists():
        raise ValueError(f"{_BIN.parent} is missing: `make .venv-peers/.ready` makes it")


def _start_lighthouse(running: Children, prefix: str, address: str, workers: int) -> str:
    """Starts it and returns its URL; the workers try again until it listens.

    It waits for everyone: a quorum of fewer would be a smaller group than the others measure.
    """
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    binary = str(_BIN / "torchft_lighthouse")
    bind = ["--bind", f"{address}:{port}", "--min_replicas", str(workers)]
    running.start(_LIGHTHOUSE, [*shlex.split(prefix), binary, *bind])
    return f"http://{address}:{port}"


def main() -> int:
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fp", type=int, choices=(32, 16), default=32)
    parser.add_argument("--mbps", type=float, help="a link per worker, of this rate both ways")
    parser.add_argument("--prefix", action="append", default=[], help="once per worker")
    parser.add_argument("--address", action="append", default=[], help="once per worker")
    parser.add_argument("--lighthouse-address", help="torchft: run it here, not beside worker 0")
    parser.add_argument("--logs", type=Path, help="keep what the processes say in this folder")
    parser.add_argument("--json", type=Path, help="write the report with every worker's part here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        report = _run(options)
    except (ValueError, PeersFailed, NoNamespaces) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "peers"}, indent=1))
    return 0


def _run(options: argparse.Namespace) -> Report:
    prefixes, addresses, lighthouse = options.prefix, options.address, options.lighthouse_address
    with ExitStack() as stack:
        if options.mbps:
            links = stack.enter_context(Namespaces(options.workers, Link(rate_mbps=options.mbps)))
            prefixes = [shlex.join(member.prefix) for member in links.members]
            addresses = [member.address for member in links.members]
            lighthouse = links.host_address
        return run_peers(
            options.kind,
            options.workers,
            options.steps,
            options.inner_steps,
            options.seed,
            prefixes,
            addresses,
            fp=options.fp,
            lighthouse_address=lighthouse,
            logs=options.logs,
        )


if __name__ == "__main__":
    raise SystemExit(main())
