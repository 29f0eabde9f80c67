"""Loops whose steps are not those of one optimizer, models whose tensors are exchanged for
others, and a loop that joins under way: all is shared, or it is said."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import murmuration
from tests.support.peers import Outcome, Peer, row, run
from tests.support.regression import Regression, check_rates, rates_beside, starts

H, ROUNDS = 5, 3


class Loop:
    """Two parts of a model, and an optimizer of each."""

    def __init__(self, peer: Peer) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        self.d, self.g = (torch.optim.SGD(part.parameters(), lr=0.01) for part in self.model)
        self.samples = torch.Generator().manual_seed(peer.index)

    def backward(self) -> None:
        self.model.zero_grad()
        first, last = self.model
        last(first(torch.randn(8, 4, generator=self.samples))).square().mean().backward()

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for each in optimizers:
            self.backward()
            each.step()

    @property
    def values(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def train(
    peer: Peer,
    a_round: Callable[[Loop], None],
    optimizers: Callable[[Loop], Any],
    before: Callable[[Loop], object] = lambda _: None,
) -> dict[str, Any]:
    """Rounds of a loop: each is to be one of the swarm's."""
    loop = Loop(peer)
    first = loop.values
    with murmuration.Swarm(
        loop.model, optimizers(loop), inner_steps=H, steps=H * ROUNDS, **peer.arguments
    ) as swarm:
        before(loop)
        for _ in range(ROUNDS):
            a_round(loop)
        done = swarm.done
    return {
        "model": loop.values.tolist(),
        "moved": not torch.equal(first, loop.values),
        "rounds": swarm.metrics["rounds_completed"],
        "done": done,
    }


def both(loop: Loop) -> list[torch.optim.Optimizer]:
    return [loop.d, loop.g]


def all_of(loop: Loop) -> torch.optim.Optimizer:
    loop.d = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    return loop.d


def critic_thrice(peer: Peer) -> dict[str, Any]:
    """Each half is frozen while the other steps."""

    def a_round(loop: Loop) -> None:
        for number in range(H):
            for half in range(2 if number == H - 1 else 1):
                for place, part in enumerate(loop.model):
                    part.requires_grad_(place == half)
                loop.step([loop.d, loop.g][half])

    return train(peer, a_round, both)


def skipped_when_due(peer: Peer) -> dict[str, Any]:
    """The second optimizer, as if a scaler skipped it: just when a round is due, at one peer."""

    def a_round(loop: Loop) -> None:
        for number in range(H):
            skips = peer.index == 1 and number == H - 1
            loop.step(*([loop.d] if skips else [loop.d, loop.g]))

    return train(peer, a_round, both)


def plain(loop: Loop) -> None:
    for _ in range(H):
        loop.step(loop.d)


def from_a_vector(peer: Peer) -> dict[str, Any]:
    def move(loop: Loop) -> None:
        vector = nn.utils.parameters_to_vector(loop.model.parameters()).detach().clone()
        nn.utils.vector_to_parameters(vector, loop.model.parameters())

    return train(peer, plain, all_of, move)


def cast(peer: Peer) -> dict[str, Any]:
    def a_round(loop: Loop) -> None:
        loop.model.to(torch.float32)
        plain(loop)

    return train(peer, a_round, all_of, lambda loop: loop.model.to(torch.bfloat16))


def check(outcomes: list[Outcome]) -> None:
    assert [each.error for each in outcomes] == ["", ""], outcomes
    first, second = (each.value for each in outcomes)
    assert first["model"] == second["model"]
    assert first["moved"]
    assert [first["rounds"], first["done"]] == [ROUNDS, True]


@row("several optimizers, in any order, as often as they like", "shared", "the busiest one counts")
@row("a GAN that freezes one half while the other steps", "shared", "no matter")
@pytest.mark.parametrize("loop", [critic_thrice, skipped_when_due])
def test_several_optimizers_are_shared_whichever_steps(tmp_path, loop):
    outcomes = run(tmp_path, loop, loop)
    check(outcomes)
    assert "frozen in the swarm" not in outcomes[0].log


@row("`p.data = ...`, `vector_to_parameters`, a cast or a layout", "shared", "tensors are followed")
@pytest.mark.parametrize("loop", [from_a_vector, cast])
def test_tensors_that_take_the_place_of_others_are_followed(tmp_path, loop):
    check(run(tmp_path, loop, loop))


def copied_before(peer: Peer, seed: int) -> dict[str, Any]:
    loop = Loop(peer)
    torch.manual_seed(seed * peer.index)
    nn.init.normal_(loop.model[0].weight)
    target = copy.deepcopy(loop.model)
    with murmuration.Swarm(loop.model, all_of(loop), inner_steps=H, **peer.arguments):
        plain(loop)
    return {"target": target[0].weight.tolist()}


@row("a target network or an average copied before the block", "told", "copy within the block")
@pytest.mark.parametrize("seed", [0, 7])
def test_copies_from_before_another_peers_first_values_came_are_told(tmp_path, seed):
    first, joiner = run(tmp_path, *[partial(copied_before, seed=seed)] * 2)
    assert [first.error, joiner.error] == ["", ""]
    told = "copies of the model from before it took over the run's values: 1"
    assert [told in each.log for each in (first, joiner)] == [False, seed > 0]


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


def rates_by_hand(peer: Peer, reads: bool) -> int:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with murmuration.Swarm(model, optimizer, **peer.arguments) as swarm:
        for step in range(swarm.step, 60) if reads else range(20):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 60)
            optimizer.step()
            assert swarm.metrics  # for a log
    return (peer.out / "events.jsonl").read_text().count("does not read swarm.step")


@row("A loop that joins under way, with a schedule", "shared", "`swarm.catch_up(scheduler)`")
@row("the same with rates by hand, or by a loss", "told", "set them by `swarm.step`")
def test_a_loop_that_joins_goes_on_at_the_learning_rate_of_the_run(tmp_path):
    check_rates(rates_beside(tmp_path / "followed", starts, rates_of_a_loop))
    for reads in (False, True):
        loop = partial(rates_by_hand, reads=reads)
        assert rates_beside(tmp_path / str(reads), starts, loop) == (not reads)
