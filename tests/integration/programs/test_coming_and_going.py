"""Peers of a loop of one's own that come and go: nobody waits for ever, and in whatever order."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import murmuration
from tests.support.peers import Peer, peers, row
from worker.catchup import bootstrap

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

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
    bootstrap._DESERTED_S = 1.0  # so that the test does not take half a minute
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
def test_the_first_peer_goes_before_the_run_begins(tmp_path: Path, number: signal.Signals) -> None:
    with peers(tmp_path, waits_for_all, joins, joins) as found:
        first, second = found.start(0), found.start(1)
        second.wait_for(lambda e: e["event"] == "said" and "(here: p0, p1)" in e["text"], "a word")
        first.send(number)
        outcome = found.outcome(1)
        assert outcome.error.startswith("PeersUnreachable: there is no run to join any more: p0 ")
        assert "\n" not in outcome.error
