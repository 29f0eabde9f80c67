"""Programs of which something is not finite on one peer of two."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import murmuration
from tests.support.peers import Peer, row, run

STEPS = 12


def train(peer: Peer, preset: str, **settings: object) -> dict[str, object]:
    """The last of two peers draws one batch that is NaN."""
    torch.manual_seed(peer.index)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inner_steps = 1 if preset == "ddp" else 4
    given = {"preset": preset, "inner_steps": inner_steps, "steps": STEPS, "settings": settings}
    with murmuration.Swarm(model, optimizer, **given, **peer.arguments) as swarm:
        while not swarm.done:
            spoiled = peer.index and swarm.step == 5
            inputs = torch.full((2, 4), math.nan if spoiled else 1.0 + peer.index)
            (model(inputs) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        figures = swarm.metrics
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"values": values.tolist(), "steps_lost": figures["steps_lost"]}


def streaming(peer: Peer) -> dict[str, object]:
    return train(peer, "streaming", **{"diloco.fragments": 2})


def onebit(peer: Peer) -> dict[str, object]:
    return train(peer, "onebit", **{"diloco.fragments": 2})


def noloco(peer: Peer) -> dict[str, object]:
    return train(peer, "noloco")


def gradients(peer: Peer) -> dict[str, object]:
    return train(peer, "ddp")


@row("a batch of NaN on one peer", "told", "its steps since the last round are undone and counted")
@pytest.mark.parametrize("loop", [streaming, onebit, noloco, gradients])
def test_one_batch_on_one_peer_does_no_harm(
    tmp_path: Path, loop: Callable[[Peer], dict[str, object]]
) -> None:
    first, second = run(tmp_path, loop, loop)
    assert (first.error, second.error) == ("", "")
    assert first.value["values"] == second.value["values"]
    assert all(map(math.isfinite, first.value["values"]))
    assert first.value["steps_lost"] == 0
    assert 1 <= second.value["steps_lost"] <= 8
    assert "not finite" not in first.log
    (line,) = [line for line in second.log.splitlines() if "not finite at step" in line]
    assert line.startswith("WARNING")
