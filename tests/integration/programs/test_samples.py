"""Samples of peers that are real processes: what differs between them is told."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import murmuration
from tests.support.peers import Peer, row, run


def splits_at_random(peer: Peer) -> None:
    torch.manual_seed(peer.index)
    data = TensorDataset(torch.arange(64.0).reshape(64, 1))
    train, held_out = random_split(data, [48, 16])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with murmuration.Swarm(model, optimizer, inner_steps=4, steps=8, **peer.arguments) as swarm:
        while not swarm.done:
            for (x,) in swarm.shard(DataLoader(train, batch_size=4, shuffle=True)):
                model(x).sum().backward()
                optimizer.step()
        assert len(held_out) == 16


@row(
    "`random_split` without a generator: a validation split leaks into training", "told", "by both"
)
def test_a_split_that_differs_is_told(tmp_path):
    outcomes = run(tmp_path, splits_at_random, splits_at_random)
    for outcome, other in zip(outcomes, ("p1", "p0"), strict=True):
        assert not outcome.error
        told = f"WARNING murmuration: warning: {other} has other samples than this peer"
        assert outcome.log.count(told) == 1


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
