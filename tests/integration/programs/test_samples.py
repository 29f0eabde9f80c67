"""Samples of peers that are real processes: what differs between them is told."""

from functools import partial
from typing import Any

import pytest
import torch

import murmuration
from tests.support.peers import Peer, row, run


def draws(peer: Peer, seed: int | None = None, scale: float = 1.0, **swarm: Any) -> object:
    """Trains with samples of a seed, which a script may set itself; else of each peer."""
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(peer.index if seed is None else seed)
    with murmuration.Swarm(model, optimizer, inner_steps=4, **swarm, **peer.arguments) as swarm_:
        for _ in range(16):
            (model(torch.randn(8, 64)).square().mean() * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        session = swarm_._session
        assert session is not None
        warned = session.io.ask(session.io.node.status)["warnings"]
    return [swarm_.metrics["rounds_completed"], warned]


SAME = "p0 and p1 contribute the same values: they train on the same samples"


@pytest.mark.parametrize(
    "program",
    [partial(draws, seed=5), partial(draws, seed=5, preset="noloco", steps=16)],
    ids=["means", "pairs"],
)
@row(
    "a script that sets the same seed on every peer, and so draws the same samples",
    "told",
    "their contributions are equal: a warning names the peers and the fix",
)
def test_peers_that_train_on_the_same_samples_are_told_once(tmp_path, program):
    outcomes = run(tmp_path, program, program)
    logged = [each.log.count(SAME) for each in outcomes]
    assert sum(logged) == len([each for each in logged if each]) > 0, outcomes
    for each, times in zip(outcomes, logged, strict=True):
        rounds, warned = each.value
        assert rounds
        assert len([text for text in warned if SAME in text]) == times


@pytest.mark.parametrize("program", [partial(draws), partial(draws, scale=0.0)])
def test_peers_with_samples_of_their_own_are_not_told(tmp_path, program):
    outcomes = run(tmp_path, program, program)
    assert all(each.value[0] and SAME not in each.log for each in outcomes), outcomes
