"""A loop of one's own that joins under way goes on at the learning rate of the run."""

from pathlib import Path
from typing import Any

import torch

import murmuration
from tests.support.peers import Peer, row
from tests.support.regression import Regression, check_rates, rates_beside, starts


def starts_regression(peer: Peer) -> None:
    starts(peer, Regression())


def rates_of_a_loop(peer: Peer) -> dict[str, Any]:
    model, seen = Regression(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 60)
    with murmuration.Swarm(model, optimizer, **peer.arguments) as swarm:
        for step in range(swarm.step, 60):
            swarm.catch_up(scheduler)
            seen[step] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
    return {"seen": seen, "end": swarm.step}


@row("A loop that joins under way, with a schedule", "shared", "`swarm.catch_up(scheduler)`")
def test_a_loop_that_joins_goes_on_at_the_learning_rate_of_the_run(tmp_path: Path) -> None:
    check_rates(rates_beside(tmp_path, starts_regression, rates_of_a_loop))
