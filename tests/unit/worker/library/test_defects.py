"""A swarm of one in which a part of a round raises: the round ends, and nobody waits for it."""

import logging

import pytest
import torch
from torch import nn

from murmuration import Swarm
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.pairwise.partner import PairValues
from murmuration.worker.exchange.round_context import Context


@pytest.mark.parametrize(
    ("preset", "part", "method"),
    [
        ("diloco", Contributor, "_encode"),
        ("diloco", Contributor, "_decoded"),
        ("ddp", Contributor, "_encode"),
        ("streaming", Contributor, "_decoded"),
        ("noloco", Context, "encoded"),
        ("noloco", PairValues, "mean"),
    ],
)
def test_a_defect_ends_its_round_with_what_was_raised(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    preset: str,
    part: type,
    method: str,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("float64 instead of float32")

    monkeypatch.setattr(part, method, broken)
    caplog.set_level(logging.WARNING, "murmuration")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inner_steps = None if preset == "ddp" else 4
    with Swarm(model, optimizer, preset=preset, inner_steps=inner_steps, steps=8) as swarm:
        while not swarm.done:
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        figures = swarm.metrics
    assert figures["rounds_completed"] == 0
    assert int(str(figures["rounds_failed"])) >= 1
    said = [record.getMessage() for record in caplog.records]
    assert any("failed: TypeError: float64 instead of float32" in line for line in said)
