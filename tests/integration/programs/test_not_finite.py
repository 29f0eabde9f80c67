"""Programs of which something is not finite on one peer of two."""

import math
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn

import murmuration
from tests.support.peers import Peer, row, run

STEPS = 12
NOTHING: Mapping[str, object] = {}


class Masked(nn.Module):
    """Buffers of which some values are no numbers: at first, from the first forward on, or not any
    more from then on."""

    def __init__(self, own: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("largest", torch.tensor([-math.inf, own]))
        self.register_buffer("lazy", torch.zeros(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest[0] = torch.maximum(self.largest[0], values.max())
            self.lazy[0] = math.nan
        return values


def train(
    peer: Peer, preset: str, spoil: bool = True, settings: Mapping[str, object] = NOTHING
) -> dict[str, object]:
    """The last of two peers draws one batch that is NaN."""
    torch.manual_seed(peer.index)
    masked = Masked(1.0 + peer.index)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), masked)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inner_steps = 1 if preset == "ddp" else 4
    given = {"preset": preset, "inner_steps": inner_steps, "steps": STEPS}
    given |= {"settings": settings} if settings else {}
    with murmuration.Swarm(model, optimizer, **{**peer.arguments, **given}) as swarm:
        while not swarm.done:
            spoiled = spoil and peer.index and swarm.step == 5
            inputs = torch.full((2, 4), math.nan if spoiled else 1.0 + peer.index)
            (model(inputs) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        figures = swarm.metrics
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "values": values.tolist(),
        "steps_lost": figures["steps_lost"],
        "rounds": figures["rounds_completed"],
        "mask": str(masked.mask.tolist()),
        "largest": masked.largest.tolist(),
        "lazy": str(masked.lazy.tolist()),
    }


@row("buffers with NaN or infinite values, as masks", "told", "those values stay on each peer")
@pytest.mark.parametrize(
    "loop",
    [
        partial(train, preset="onebit", spoil=False),
        partial(train, preset="noloco", spoil=False, settings={"diloco.anchor_codec": "bf16"}),
    ],
    ids=["onebit", "pairs"],
)
def test_values_of_buffers_that_are_no_numbers_stay_at_home(tmp_path, loop):
    outcomes = run(tmp_path, loop, loop)
    first, second = (each.value for each in outcomes)
    assert [each.error for each in outcomes] == ["", ""]
    assert first["values"] == second["values"]
    assert first["rounds"] >= 2
    assert first["largest"][0] < math.inf
    assert first["largest"][1] == second["largest"][1]  # a number is shared as ever
    for each in outcomes:
        assert each.value["mask"] == "[[0.0, -inf], [0.0, 0.0]]"
        assert each.value["lazy"] == "[nan, 0.0]"
        said = [line for line in each.log.splitlines() if "not finite" in line]
        assert all(line.startswith("WARNING") for line in said)
        assert {sum(name in line for line in said) for name in ("mask", "largest", "lazy")} == {1}


@row(
    "a batch of NaN or infinite values, or such a loss",
    "told",
    "its steps since the last round are undone and counted",
)
@pytest.mark.parametrize(
    "loop",
    [
        partial(train, preset="onebit", settings={"diloco.fragments": 2}),
        partial(train, preset="noloco"),
    ],
    ids=["onebit", "noloco"],
)
def test_one_batch_on_one_peer_does_no_harm(tmp_path, loop):
    first, second = run(tmp_path, loop, loop)
    assert (first.error, second.error) == ("", "")
    assert first.value["values"] == second.value["values"]
    assert all(map(math.isfinite, first.value["values"]))
    assert first.value["steps_lost"] == 0
    assert 1 <= second.value["steps_lost"] <= 8
    assert "not finite at step" not in first.log
    (line,) = [line for line in second.log.splitlines() if "not finite at step" in line]
    assert line.startswith("WARNING")
