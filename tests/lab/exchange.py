"""How fast peers exchange when nothing trains: encode, send, decode, reduce, over loopback.

    python -m tests.lab exchange [--peers 2] [--mbytes 64] [--rounds 8] [--codec fp32] [...]
    python -m tests.lab exchange --link 200mbit,delay=50ms --mbytes 24     # a round trip of 100 ms

Each peer is a process with the real node, transport and rounds. Printed per peer: the payload that
it sent over the time of its median round; behind links, also the part of their rate that it used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import torch

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.link import parse_link
from murmuration.algorithms.plan import PRESETS
from murmuration.coordinator.processes import ProxyProcess
from murmuration.worker.background import workers
from murmuration.worker.config import Config, RunConfig
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Phase
from murmuration.worker.node.node import Environment, Node, NodeConfig
from murmuration.worker.training.mailbox import (
    Begin,
    IOThread,
    Mailbox,
    Published,
    RoundDone,
    Started,
    ToTrain,
)
from murmuration.worker.transport.grpc import GrpcTransport
from murmuration.worker.wire import state_hash
from tests.support.workers import free_addresses

Message = TypeVar("Message", bound=ToTrain)
Round = tuple[int, float]
"""Payload bytes sent, and seconds."""


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """The work of all peers. Args: proxies: of the proxy, of each peer; none without links."""

    addresses: list[str]
    mbytes: float
    rounds: int
    codec: str = "fp32"
    proxies: list[str] = field(default_factory=list)


def peer(index: int, options: Exchanged) -> None:
    """One peer's process: rounds as fast as they go."""
    addresses = options.addresses
    torch.set_num_threads(1)
    elements = int(options.mbytes * 1_000_000) // 4
    plan = replace(PRESETS["diloco"], codec=options.codec, reduction_codec=options.codec)
    config = Config(run=RunConfig(steps=options.rounds * plan.inner_steps), plan=plan)
    mailbox, proxies = Mailbox(), [*options.proxies, *[None] * len(addresses)]
    transport = GrpcTransport(addresses[index], proxies[index])

    def make() -> Node:
        others = tuple(address for at, address in enumerate(addresses) if at != index)
        return Node(
            node=NodeConfig(peer=f"p{index}", joins=others, min_peers=len(addresses)),
            config=config,
            manifest=Manifest.of(config, []),
            fragments=[Fragment(0, (TensorSpec("w", (elements,)),))],
            transport=transport,
            mailbox=mailbox,
            environment=Environment(offload=workers(), log=lambda event: None),
        )

    io = IOThread(make, mailbox, lambda event: None)
    io.start()
    empty = torch.empty(0)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(index))
    state = FragmentState(0, 0, (), empty, empty, state_hash(empty, empty, ()))
    mailbox.post(Published(Phase.READY, 0, 0, (state,)))
    group = _await(mailbox, Started).group
    state = replace(state, group=group, hash=state_hash(empty, empty, group))
    rounds: list[Round] = []
    for number in range(options.rounds):
        mailbox.post(Published(Phase.TRAINING, number, number, (state,)))
        before, started = io.node.context.counts.payload_sent_bytes, time.perf_counter()
        mailbox.post(Begin(0, number, state.group, values, empty))
        done = _await(mailbox, RoundDone)
        took_s = time.perf_counter() - started
        sent = io.node.context.counts.payload_sent_bytes - before
        rounds.append((sent, took_s))
        state = replace(state, version=number + 1, group=done.next_group or state.group)
    mailbox.post(Published(Phase.DONE, options.rounds, options.rounds, (state,)))
    print(json.dumps(rounds), flush=True)
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


def run(options: Exchanged) -> list[list[Round]]:
    """The rounds of each peer but the first, which opens the connections."""
    own = [sys.executable, "-m", "tests.lab.exchange", "--peer"]
    peers = [
        subprocess.Popen(
            [*own, json.dumps([index, asdict(options)])],
            env={**os.environ, "PYTHONPATH": "."},
            stdin=subprocess.PIPE,  # held open: a peer stays until it is told to go
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(len(options.addresses))
    ]
    try:
        reports = [json.loads((each.stdout and each.stdout.readline()) or "[]") for each in peers]
    finally:
        for each in peers:
            each.kill()
            each.communicate()
    if any(len(report) != options.rounds for report in reports):
        raise SystemExit("a peer has ended early")
    return [report[1:] for report in reports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--mbytes", type=int, default=64, help="fragment size, MB of fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--link", type=parse_link, help="such as 200mbit,delay=50ms, of each peer")
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    peers, link, one = (given.pop(name) for name in ("peers", "link", "peer"))
    if one is not None:
        return peer(one[0], Exchanged(**one[1]))
    options = Exchanged(addresses=free_addresses(peers), **given)
    print(f"{peers} peers, {options.mbytes} MB of fp32, codec {options.codec}")
    with ExitStack() as opened:
        if link is not None:
            behind = {f"p{n}": (at, link) for n, at in enumerate(options.addresses)}
            proxy = opened.enter_context(ProxyProcess(behind))
            options = replace(options, proxies=[proxy.proxies[name] for name in behind])
        reports = run(options)
    share = 2 * (peers - 1) / peers
    for name, rounds in enumerate(reports):
        took_s = statistics.median(took_s for _, took_s in rounds)
        sent = statistics.median(sent for sent, _ in rounds)
        found = [sent / took_s / 1e6 for sent, took_s in rounds]
        used = f", {8 * statistics.median(found) / link.rate_mbps:.3f} of the link" if link else ""
        print(
            f"  p{name}: {statistics.median(found):.0f} MB/s sent (and as much received), "
            f"round {took_s:.3f} s, best {max(found):.0f}, worst {min(found):.0f} MB/s, "
            f"{sent / (share * options.mbytes * 1e6):.4f} of 2(n-1)/n{used}"
        )
    return None


if __name__ == "__main__":
    main()
