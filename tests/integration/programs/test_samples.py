"""Samples of peers that are real processes: what differs between them is told."""

from pathlib import Path

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
def test_a_split_that_differs_is_told(tmp_path: Path) -> None:
    outcomes = run(tmp_path, splits_at_random, splits_at_random)
    for outcome, other in zip(outcomes, ("p1", "p0"), strict=True):
        assert not outcome.error
        told = f"WARNING murmuration: warning: {other} has other samples than this peer"
        assert outcome.log.count(told) == 1
