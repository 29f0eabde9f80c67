"""How a loop ends: what was learned since the last round is shared, or stays in the model."""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import murmuration
from tests.support.peers import Outcome, Peer, row, run

H = 20
ONES = torch.ones(1, 4)


def model_of() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def result_of(swarm: murmuration.Swarm, model: nn.Module) -> dict[str, Any]:
    first, _ = model_of()
    return {
        "model": values(model).tolist(),
        "moved": not torch.equal(values(first), values(model)),
        "rounds": swarm.metrics["rounds_completed"],
        "step": swarm.step,
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor = ONES) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(peer: Peer, counts: Sequence[int], **arguments: Any) -> dict[str, Any]:
    """A loop of so many steps, on samples of its own, without a word of how long the run is.

    Args: counts: of each peer; the last is that of all others."""
    model, optimizer = model_of()
    samples = torch.Generator().manual_seed(peer.index)
    given = {"inner_steps": H, **arguments} if arguments.get("preset") != "ddp" else arguments
    with murmuration.Swarm(model, optimizer, **{**peer.arguments, **given}) as swarm:
        for _ in range([*counts, counts[-1]][min(peer.index, len(counts))]):
            step(model, optimizer, torch.randn(8, 4, generator=samples))
    return result_of(swarm, model)


def until_alone(peer: Peer, preset: str) -> dict[str, Any]:
    """The first loop goes on until the other has left, and then to the next round."""
    if peer.index:
        return train(peer, [15], preset=preset)
    model, optimizer = model_of()
    arguments = {"inner_steps": H, "preset": preset, **peer.arguments}
    with murmuration.Swarm(model, optimizer, **arguments) as swarm:
        while len(swarm.peers) == 2 or swarm.step % H:
            step(model, optimizer)
            time.sleep(0.01)  # the other one needs the cores
    return result_of(swarm, model)


def fails(peer: Peer) -> dict[str, Any]:
    """The second loop ends with an error that is caught: its model stays as it was."""
    model, optimizer = model_of()
    try:
        with murmuration.Swarm(model, optimizer, inner_steps=H, **peer.arguments) as swarm:
            for _ in range(15):
                step(model, optimizer)
            held = values(model)
            if peer.index:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert torch.equal(held, values(model))
        with murmuration.Swarm(*model_of()):
            pass
    return result_of(swarm, model)


PRESETS = {
    "long run": partial(train, counts=[15], steps=1000),
    "onebit": partial(train, counts=[39], preset="onebit"),
    "noloco": partial(train, counts=[39], preset="noloco"),
    "ddp": partial(train, counts=[9], preset="ddp"),
}


def left(folder: Path, index: int) -> dict[str, Any]:
    """The last words of a peer as it leaves."""
    events = map(json.loads, (folder / f"p{index}" / "events.jsonl").read_text().splitlines())
    return next(event for event in events if event["event"] == "left")


def check_one_model(outcomes: list[Outcome]) -> None:
    assert [each.error for each in outcomes] == [""] * len(outcomes), outcomes
    first = outcomes[0].value
    assert all(each.value["model"] == first["model"] for each in outcomes)
    assert first["moved"]


@row("a loop that is shorter than H", "shared", "a last round is held as the block ends")
@pytest.mark.parametrize("steps", [15, 39])
def test_what_was_learned_since_the_last_round_is_in_one_more(tmp_path, steps):
    loop = partial(train, counts=[steps])
    outcomes = run(tmp_path, loop, loop)
    check_one_model(outcomes)
    assert outcomes[0].value["rounds"] == 1 + steps // H
    assert left(tmp_path, 0)["unsent_steps"] == 0


@row("any preset in a loop without `steps=`", "shared", "all end with one model")
@pytest.mark.parametrize("loop", PRESETS.values(), ids=PRESETS)
def test_loops_without_an_end_end_with_one_model(tmp_path, loop):
    outcomes = run(tmp_path, loop, loop, loop)
    check_one_model(outcomes)
    assert outcomes[0].value["rounds"] > 0
    assert (left(tmp_path, 1)["unsent_steps"], left(tmp_path, 1)["others"]) == (0, [])
    assert "contribute the same" not in outcomes[0].log


@row("loops of other lengths", "shared", "the shorter one waits a while, and has what is last")
@pytest.mark.parametrize("counts", [[15, 7], [15, 0]])
def test_loops_that_end_at_other_steps_end_with_one_model(tmp_path, counts):
    loop = partial(train, counts=counts)
    check_one_model(run(tmp_path, loop, loop))
    assert left(tmp_path, 1)["others"] == []


@row("a loop that ends while the others go on", "shared", "its last round counts, then it leaves")
def test_a_peer_that_leaves_has_shared_what_it_learned(tmp_path):
    loop = partial(until_alone, preset="diloco")
    stays, leaves = run(tmp_path, loop, loop)
    assert (stays.error, leaves.error) == ("", "")
    said = left(tmp_path, 1)
    assert (said["unsent_steps"], said["others"], said["apart"]) == (0, ["p0"], False)
    assert leaves.value["rounds"] == 1


@row("pairs that end while others go on", "told", "the model is the peer's own: give `steps=`")
def test_a_peer_that_leaves_pairs_says_that_its_model_is_its_own(tmp_path):
    _, leaves = run(tmp_path, *(2 * [partial(until_alone, preset="noloco")]))
    assert (leaves.error, left(tmp_path, 1)["apart"]) == ("", True)


@row("an error in the loop", "told", "the parameters stay as they are; the others go on")
@row("a notebook's cell that begins a run, and is run again", "told", "how to join the others")
def test_a_loop_that_fails_keeps_its_model(tmp_path):
    goes_on, failed = run(tmp_path, fails, fails)
    assert (goes_on.error, failed.error) == ("", "")
    assert [each.value["moved"] for each in (goes_on, failed)] == [True, True]
    assert "the one that this process left goes on with p0: to go on in that one" in failed.log
