"""A swarm of one, in this process: what is not finite is undone and told, and a round that raises
ends."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from murmuration import Swarm, UsageError
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.pairwise.partner import PairValues

NAN = float("nan")
STEPS, INNER_STEPS = 16, 4
Change = Callable[[int, nn.Module, torch.optim.Optimizer], None]


class Loop:
    """A loop of four layers; `swarm` is the one that it was in."""

    def __init__(self, preset: str, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        given = {"inner_steps": None if preset == "ddp" else INNER_STEPS, "settings": settings}
        self.swarm = Swarm(self.model, self.optimizer, preset=preset, steps=STEPS, **given)
        self.losses: list[float] = []

    def run(
        self, factor: Callable[[int], float] = lambda _: 1.0, after: Change = lambda *_: None
    ) -> "Loop":
        """Args: factor: of the loss of a step; after: called after each."""
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        with self.swarm as swarm:
            for step in range(1, STEPS + 1):
                loss = (self.model(inputs) - 1).square().mean()
                self.losses.append(loss.item())
                (loss * factor(step)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                after(step, self.model, self.optimizer)
            self.figures = swarm.metrics
        self.losses.append((self.model(inputs) - 1).square().mean().item())
        return self

    @property
    def is_finite(self) -> bool:
        """Tells whether parameters and moments are finite, at the end."""
        moments = [each for s in self.optimizer.state.values() for each in s.values()]
        return all(each.isfinite().all() for each in [*self.model.parameters(), *moments])


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far of what is not finite."""
    caplog.set_level(logging.WARNING, "murmuration")
    return lambda: [line for line in caplog.messages if "not finite" in line]


@pytest.mark.parametrize("at", [1, 4, 6, STEPS])
@pytest.mark.parametrize("preset", ["streaming", "onebit", "noloco", "ddp"])
def test_one_batch_costs_some_steps_and_no_more(told, preset, at):
    """Before the first round, at one, with one on its way, and at the end of the run."""
    loop = Loop(preset).run(lambda step: NAN if step == at else 1.0)
    (line,) = told()
    assert " not finite at step " in line
    assert 1 <= loop.figures["steps_lost"] <= (1 if preset == "ddp" else 2 * INNER_STEPS)
    assert loop.is_finite
    assert loop.losses[-1] < loop.losses[0]


def test_many_such_batches_are_counted_and_told_ever_more_rarely(told):
    settings = {"diloco.fragments": 2}
    loop = Loop("streaming", **settings).run(lambda step: NAN if step > 2 else 1.0)
    assert 2 <= len(told()) <= 4
    assert loop.is_finite


def test_a_loss_of_nan_with_finite_parameters_costs_nothing(told):
    """The loop leaves such a batch out by itself."""
    loop = Loop("diloco")
    loop.run(after=lambda step, *_: loop.swarm.report(NAN if step == 5 else 1.0))
    assert loop.figures["steps_lost"] == 0
    assert told() == []


def test_what_is_not_finite_at_first_is_refused():
    model = nn.Linear(2, 2)
    model.bias.data[1] = NAN
    with pytest.raises(UsageError, match=r"^parameter 'bias' has values that are not finite, "):
        Swarm(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("settings", [{}, {"diloco.merge": "keep"}])
def test_what_is_on_its_way_counts_as_without_such_a_batch(settings):
    """The round of step 12 is applied after step 14, whatever becomes of step 13."""
    anchors: list[Tensor] = []
    given = {"diloco.fragments": 1, "diloco.overlap_steps": 2, "diloco.merge_alpha": 0.0} | settings
    for value in (1.0, NAN):
        loop = Loop("streaming", **given)

        def look(step: int, *_: object, swarm: Swarm = loop.swarm) -> None:
            if step == 14:
                anchors.append(swarm.state_dict()["fragments"][0]["anchor"])

        loop.run(lambda step, value=value: value if step == 13 else 1.0, look)
        assert loop.figures["steps_lost"] == (0 if value == 1.0 else 2)
        assert loop.is_finite
    assert torch.equal(*anchors)


@pytest.mark.parametrize(
    ("preset", "part", "method"),
    [
        ("diloco", Contributor, "_encode"),
        ("diloco", Contributor, "_decoded"),
        ("ddp", Contributor, "_encode"),
        ("streaming", Contributor, "_decoded"),
        ("noloco", PairValues, "own"),
        ("noloco", PairValues, "mean"),
    ],
)
def test_a_defect_ends_its_round_with_what_was_raised(monkeypatch, caplog, preset, part, method):
    def broken(*_: object, **__: object) -> None:
        raise TypeError("float64 instead of float32")

    monkeypatch.setattr(part, method, broken)
    caplog.set_level(logging.WARNING, "murmuration")
    figures = Loop(preset).run().figures
    assert figures["rounds_completed"] == 0
    assert int(str(figures["rounds_failed"])) >= 1
    assert "failed: TypeError: float64 instead of float32" in caplog.text
