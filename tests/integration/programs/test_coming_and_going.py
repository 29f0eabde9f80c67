"""Peers of a loop of one's own that come and go: nobody waits for ever, in whatever order."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import murmuration
from murmuration.worker.catchup import bootstrap
from murmuration.worker.folder import remembered
from tests.support.peers import Peer, peers, row

H = 20
QUICK = {"membership.probe_timeout_s": 0.5, "membership.suspicion_factor": 1.0}


class Tells(logging.Handler):
    """Tells the test what a peer logs."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def emit(self, record: logging.LogRecord) -> None:
        self._peer.tell("said", text=record.getMessage())


@contextmanager
def training(peer: Peer, **more: Any) -> Iterator[tuple[murmuration.Swarm, Callable[[], None]]]:
    """The swarm, and a function that takes a step."""
    logging.getLogger("murmuration").addHandler(Tells(peer))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        model(torch.ones(1, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)  # others need the cores

    arguments = {**peer.arguments, "settings": QUICK, **more}
    with murmuration.Swarm(model, optimizer, **arguments) as swarm:
        yield swarm, step


def waits_for_all(peer: Peer) -> None:
    """The first peer, which ends at its signal: not all come."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with training(peer, inner_steps=H):
            raise AssertionError("the run has begun")
    except KeyboardInterrupt:
        return


def joins(peer: Peer) -> int:
    bootstrap.DESERTED_S = 1.0  # so that the test does not take half a minute
    with training(peer) as (swarm, step):
        for _ in range(H):
            step()
        return swarm.step


@row(
    "The first peer dies, hangs or leaves while another one joins it",
    "told",
    "the joiner says for whom it waits, and ends with `PeersUnreachable`; with the state of a "
    "run under way it goes on alone",
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_first_peer_goes_before_the_run_begins(tmp_path, number):
    with peers(tmp_path, waits_for_all, joins, joins) as found:
        first, second = found.start(0), found.start(1)
        second.wait_for(lambda e: e["event"] == "said" and "(here: p0, p1)" in e["text"], "a word")
        first.send(number)
        outcome = found.outcome(1)
        assert outcome.error.startswith("PeersUnreachable: there is no run to join any more: p0 ")
        assert "\n" not in outcome.error


def says(words: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == "said" and words in event["text"]


def trains(peer: Peer, **more: Any) -> float:
    """All together, to the end of a run of three rounds; the sum of the weights that all have."""
    given = {"inner_steps": H, "steps": 3 * H} if peer.index == 0 else {}
    with training(peer, **given, **more) as (swarm, step):
        while not swarm.done:
            step()
        (weight, _) = swarm._replica.parameters.values()
    return float(weight.sum())


def trains_in_a_notebook(peer: Peer) -> float:
    """An event loop runs, as in Jupyter."""

    async def cell() -> float:
        return trains(peer)

    return asyncio.run(cell())


def tries_several(peer: Peer) -> float:
    """Nobody is at the first address."""
    return trains(peer, join=["127.0.0.1:9", peer.address])


@row("A notebook, or an async program: an event loop runs already", "shared", "as elsewhere")
@row(
    "The peers are started in any order",
    "shared",
    "a joiner tries on for `wait_s`, and a warning says whom it tries",
)
def test_joiners_may_start_first(tmp_path):
    with peers(tmp_path, *[trains_in_a_notebook] * 2, tries_several) as found:
        joiners = [found.start(1), found.start(2)]
        for each in joiners:
            each.wait_for(says(f"{found.address}: connection refused; check the address"), "a word")
        found.start(0)
        outcomes = [found.outcome(index) for index in range(3)]
        assert [each.error for each in outcomes] == [""] * 3, outcomes
        assert len({each.value for each in outcomes}) == 1


def endless(peer: Peer) -> None:
    """Trains until it is killed, and says when it will find all others again."""
    first = {"inner_steps": 5, "min_peers": 2} if peer.index == 0 else {}
    with training(peer, **first) as (_, step):
        named = [peer.address][: peer.index]
        while len(remembered(peer.out, named, print).members) < peer.count - 1:
            step()
        peer.tell("remembers")
        while True:
            step()


@row(
    "A peer is started again while the one that it names is away",
    "shared",
    "it comes back through members that its `out` remembers",
)
def test_a_peer_comes_back_though_the_one_that_it_names_is_away(tmp_path):
    with peers(tmp_path, endless, endless, endless) as found:
        first, second, third = (found.start(index) for index in range(3))
        for each in (first, second, third):
            each.wait_for(lambda e: e["event"] == "remembers", "memory")
        for each in (third, first):
            each.send(signal.SIGKILL)
            each.wait()
        again = found.start(2)
        again.wait_for(says("took over p1's state"), "the state")
