"""A small regression, and a loop that others join half-way, for tests of trainers and loops."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import murmuration
from murmuration.worker.membership import Phase
from murmuration.worker.wire import tensor_hash
from tests.support.peers import Peer, peers

H, STEPS = 4, 18
PRESETS = ("diloco", "streaming", "co2", "onebit", "sparse", "noloco", "streaming-noloco", "ddp")
_OVERLAP_STEPS = {"streaming": 2, "co2": H, "streaming-noloco": 2}


class Regression(nn.Module):
    """Small, in the form that transformers' trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(inputs).squeeze(-1)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def rows() -> TensorDataset:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(-1).sin())


def swarm_of(preset: str, **more: Any) -> dict[str, Any]:
    overlap = {"diloco.overlap_steps": _OVERLAP_STEPS[preset]} if preset in _OVERLAP_STEPS else {}
    steps = {} if preset == "ddp" else {"inner_steps": H}
    return {"preset": preset, "name": "me", "settings": overlap, **steps, **more}


def ends(swarm: murmuration.Swarm | None, model: nn.Module) -> list[str]:
    assert swarm is not None
    fragments = swarm.state_dict()["fragments"]
    kinds = [[each[kind] for each in fragments] for kind in ("anchor", "momentum")]
    return [tensor_hash(each) for each in (*kinds, [p.detach() for p in model.parameters()])]


def starts(peer: Peer, model: nn.Module | None = None) -> None:
    """A loop that is at step 30 of 60 when the other one joins."""
    model = Regression() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = {**peer.arguments, "min_peers": 1, "steps": 60, "inner_steps": H}
    with murmuration.Swarm(model, optimizer, **given) as swarm:
        while not swarm.done:
            if swarm.step == 30:
                peer.tell("half")
                assert swarm._session is not None
                while not any(each.phase is Phase.TRAINING for each in swarm._session.others):
                    time.sleep(0.02)  # the other one needs the cores
            optimizer.step()


def check_rates(found: dict[str, Any]) -> None:
    """Those of a peer that `starts` was joined by: 0.01, down to 0 at step 60."""
    seen = {int(step): rate for step, rate in found["seen"].items()}
    assert min(seen) >= 24  # as of its last round, or later
    assert found["end"] == 60
    for step, rate in seen.items():
        assert abs(rate - 1e-2 * (1 - step / 60)) < 1e-9, step


def rates_beside(folder: Path, first: Callable[[Peer], None], second: Callable[[Peer], Any]) -> Any:
    """Returns what the second has seen, which joins the first half-way."""
    with peers(folder, first, second) as found:
        found.start(0).wait_for(lambda event: event["event"] == "half", "half of the run")
        found.start(1)
        joined = found.outcome(1)
        assert (joined.error, found.outcome(0).error) == ("", "")
    return joined.value
