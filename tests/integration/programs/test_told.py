"""What a loop hears of its swarm unasked: who joins, dies and leaves, and the first round."""

import os
from pathlib import Path
from typing import Any

import torch

import murmuration
from tests.support.peers import Peer, row, run

QUICK = {"membership.probe_timeout_s": 0.5, "membership.suspicion_factor": 1.0}


def swarm_of(peer: Peer, **more: Any) -> tuple[murmuration.Swarm, torch.nn.Module, Any]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {**peer.arguments, "settings": QUICK, "inner_steps": 5, **more}
    return murmuration.Swarm(model, optimizer, **arguments), model, optimizer


def waits_until_alone(peer: Peer) -> None:
    swarm, model, optimizer = swarm_of(peer)
    with swarm:
        while len(swarm.peers) > 1:
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()


def dies_after_two_rounds(peer: Peer) -> None:
    swarm, model, optimizer = swarm_of(peer)
    with swarm:
        while swarm.metrics["rounds_completed"] != 2:
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
        os._exit(0)


@row("a peer that joins or dies", "told", "a line of `logging` at INFO, with its name")
def test_joins_deaths_and_the_first_round_are_lines_at_info(tmp_path: Path) -> None:
    first, _ = run(tmp_path, waits_until_alone, dies_after_two_rounds)
    assert first.code == 0, first.log
    said = [x.partition("INFO murmuration: ")[2] for x in first.log.splitlines()]
    assert "5 parameters, preset diloco, a round every 5 steps, on cpu" in said
    assert "p1 is alive" in said
    assert "started at step 0 with p0, p1" in said
    assert sum(line.startswith("the first round 0 of fragment 0: 2 peers") for line in said) == 1
    assert not any(line.startswith("round 1 ") for line in said)
    assert "p1 is dead" in said
