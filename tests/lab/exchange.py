"""How fast peers exchange when nothing trains: encode, send, decode, reduce, over loopback.

    python -m tests.lab exchange [--peers 2] [--mbytes 64] [--rounds 8] [--codec fp32] [...]
    python -m tests.lab exchange --link 200mbit,delay=50ms --mbytes 24     # a round trip of 100 ms

Each peer is a process with the real node, transport and rounds. Printed per peer: the payload that
it sent (its contributions and the reductions it answers with) over the time that its rounds took,
from handing the values over to having the mean; the median round, since the machine is shared.
Behind links, which a relay in a process of its own makes, also the part of its rate that it used.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.queues import Queue
from typing import Any, TypeVar

import torch

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.link import parse_link
from murmuration.algorithms.plan import PRESETS
from murmuration.coordinator.processes import RelayProcess
from murmuration.worker.config import Config, RunConfig
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Phase
from murmuration.worker.node.component import Environment, NodeConfig
from murmuration.worker.node.iothread import IOThread
from murmuration.worker.node.node import Node
from murmuration.worker.training.mailbox import (
    Begin,
    Mailbox,
    PrefetchedAnchor,
    Published,
    RoundDone,
    Started,
    ToTrain,
)
from murmuration.worker.transport.grpc import GrpcTransport
from murmuration.worker.wire import state_hash
from tests.support.workers import free_addresses

Message = TypeVar("Message", bound=ToTrain)


def peer(
    index: int,
    addresses: list[str],
    options: argparse.Namespace,
    results: "Queue[str]",
) -> None:
    """One peer's process: rounds as fast as they go, or with a pause before each."""
    torch.set_num_threads(1)
    elements = int(options.mbytes * 1_000_000) // 4
    plan = replace(PRESETS[options.preset], codec=options.codec, reduction_codec=options.codec)
    config = Config(run=RunConfig(steps=options.rounds * plan.inner_steps), plan=plan)
    mailbox = Mailbox()
    proxy = options.proxies[index] if getattr(options, "proxies", None) else None
    transport = GrpcTransport(addresses[index], proxy)

    def make() -> Node:
        async def offload(work):
            return await asyncio.get_running_loop().run_in_executor(None, work)

        others = tuple(address for at, address in enumerate(addresses) if at != index)
        return Node(
            node=NodeConfig(peer=f"p{index}", joins=others, min_peers=len(addresses)),
            config=config,
            manifest=Manifest.of(config, []),
            fragments=[Fragment(0, (TensorSpec("w", (elements,)),))],
            transport=transport,
            mailbox=mailbox,
            environment=Environment(offload=offload, log=lambda event: None),
        )

    io = IOThread(make, mailbox, lambda event: None)
    io.start()
    empty = torch.empty(0)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(index))
    start = torch.randn(elements, generator=torch.Generator().manual_seed(len(addresses)))
    anchor = start if plan.exchange == "pairs" else empty  # all begin with the same
    state = FragmentState(0, 0, (), anchor, empty, state_hash(anchor, empty, ()))
    mailbox.post(Published(Phase.READY, 0, 0, (state,)))
    group = _await(mailbox, Started).group
    state = replace(state, group=group, hash=state_hash(anchor, empty, group))
    rounds: list[tuple[int, float, float]] = []
    for number in range(options.rounds):
        ended = time.perf_counter()
        mailbox.post(Published(Phase.TRAINING, number, number, (state,)))
        if plan.exchange == "pairs" and number > 0:  # workers compute when these have come
            while _await(mailbox, PrefetchedAnchor).round != number:
                pass
        ahead_s = time.perf_counter() - ended
        time.sleep(options.pause_s)  # the inner steps between two rounds
        before, started = io.node.context.counts.payload_sent_bytes, time.perf_counter()
        mailbox.post(Begin(0, number, state.group, values, anchor))
        done = _await(mailbox, RoundDone)
        took_s = time.perf_counter() - started
        sent = io.node.context.counts.payload_sent_bytes - before
        rounds.append((sent, took_s, ahead_s))
        state = replace(state, version=number + 1, group=done.next_group or state.group)
    mailbox.post(Published(Phase.DONE, options.rounds, options.rounds, (state,)))
    results.put(json.dumps({"peer": f"p{index}", "rounds": rounds}))
    sys.stdin.readline()  # others may still need this one
    io.close()


def _await(mailbox: Mailbox, kind: type[Message]) -> Message:
    while True:
        message = mailbox.wait()
        if isinstance(message, kind):
            return message
        error = getattr(message, "error", None) or getattr(message, "reason", None)
        if error:
            raise SystemExit(f"exchange: {error}")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each peer reports of its rounds, by name."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    addresses = free_addresses(options.peers)
    names = [f"p{index}" for index in range(options.peers)]
    peers = [
        context.Process(target=peer, args=(index, addresses, options, results))
        for index in range(options.peers)
    ]
    with ExitStack() as opened:
        if options.link is not None:
            behind = {name: (at, options.link) for name, at in zip(names, addresses, strict=True)}
            relay = opened.enter_context(RelayProcess(behind))
            options.proxies = [relay.proxies[name] for name in names]
        for each in peers:
            each.start()
        reports = [json.loads(results.get()) for _ in peers]
        for each in peers:
            each.kill()
            each.join()
    return sorted(reports, key=lambda each: each["peer"])


def rates(report: dict[str, Any]) -> list[float]:
    """MB/s sent in each round but the first, which opens the connections."""
    return [sent / took_s / 1e6 for sent, took_s, _ in report["rounds"][1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--mbytes", type=int, default=64, help="fragment size, MB of fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--preset", default="diloco", choices=("diloco", "noloco"))
    parser.add_argument("--pause-s", type=float, default=0.0, help="before each round")
    parser.add_argument("--link", type=parse_link, help="such as 200mbit,delay=50ms, of each peer")
    options = parser.parse_args()
    print(f"{options.peers} peers, {options.mbytes} MB of fp32, codec {options.codec}")
    share = 2 * (options.peers - 1) / options.peers
    for report in run(options):
        timed = report["rounds"][1:]
        took_s = statistics.median(took_s for _, took_s, _ in timed)
        sent = statistics.median(sent for sent, _, _ in timed)
        found = rates(report)
        used = 8 * statistics.median(found) / options.link.rate_mbps if options.link else None
        print(
            f"  {report['peer']}: {statistics.median(found):.0f} MB/s sent (and as much received), "
            f"round {took_s:.3f} s, best {max(found):.0f}, worst {min(found):.0f} MB/s, "
            f"{sent / (share * options.mbytes * 1e6):.4f} of 2(n-1)/n"
            + (f", {used:.3f} of the link" if used is not None else "")
        )


if __name__ == "__main__":
    main()
