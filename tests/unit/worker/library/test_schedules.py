"""Schedulers of all kinds are brought to where the run is, and those that cannot be are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from murmuration import Swarm, UsageError
from murmuration.worker.library.steps import catch_up
from murmuration.worker.library.trainers import TrainersSwarm
from tests.support.peers import row

STEPS = 60
KINDS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),
    "cosine": lambda o: CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, STEPS - 5)], [5]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 10), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "steps": lambda o: StepLR(o, 10),
}


def rate_of(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def optimizer_of() -> Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 4])
def test_a_scheduler_is_brought_to_where_the_run_is(kind, every):
    there, late = optimizer_of(), optimizer_of()
    scheduler, other = KINDS[kind](there), KINDS[kind](late)
    for step in range(STEPS):
        if step in (31, 32, 45):  # joins, goes on, and skips some steps
            catch_up([other], step, every)
            assert rate_of(late) == rate_of(there)
        catch_up([scheduler], step, every)  # it is there already
        there.step()
        if (step + 1) % every == 0:
            scheduler.step()


def test_what_cannot_catch_up_is_refused():
    for scheduler, every, says in [
        (ReduceLROnPlateau(optimizer_of()), 1, "follows a loss and not the position"),
        (object(), 1, "object has no last_epoch"),
        (KINDS["cosine"](optimizer_of()), 0, "every=0"),
    ]:
        with pytest.raises(UsageError, match=says):
            catch_up([scheduler], 5, every)


def test_a_loop_that_goes_on_from_a_state_has_the_learning_rate_of_its_step():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Swarm(model, optimizer, steps=9) as first:
        for _ in range(5):
            optimizer.step()
        saved = first.state_dict()
    swarm = Swarm(model, optimizer, steps=12)
    swarm.load_state_dict(saved)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 12)
    swarm.catch_up(scheduler)
    assert (swarm.steps, rate_of(optimizer)) == (12, pytest.approx(0.1 * 7 / 12))
    assert Swarm(model, optimizer).steps is None


def of_a_trainer(optimizer: Optimizer) -> tuple[torch.nn.Module, TrainersSwarm]:
    """The swarm of a trainer that has taken six steps in it."""
    model, entered = torch.nn.Linear(2, 1), TrainersSwarm({})
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    entered.enter(Swarm(model, optimizer, inner_steps=3, steps=9), 9, 0, None)
    for _ in range(6):
        optimizer.step()
    return model, entered


def test_what_a_trainers_schedulers_leave_out_is_told(caplog):
    optimizer = optimizer_of()
    decays = StepLR(optimizer, 1)
    others = [(ReduceLROnPlateau(optimizer), 1), (KINDS["cosine"](optimizer), None)]
    _, entered = of_a_trainer(optimizer)
    assert entered.catch_up(1, [(decays, 3), *others]) == 5
    assert decays.last_epoch == 2
    entered.leave()
    assert "ReduceLROnPlateau does not follow the position in the run: 5 steps" in caplog.text
    assert "CosineAnnealingLR steps once in an epoch, whose length is not known" in caplog.text
    assert entered.catch_up(6, [(decays, 3)]) == 0


def test_a_swarm_that_cannot_be_left_says_nothing_of_what_the_model_holds(monkeypatch, caplog):
    def fails(_swarm: Swarm) -> None:
        raise UsageError("no")

    model, entered = of_a_trainer(optimizer_of())
    monkeypatch.setattr(Swarm, "_end", fails)
    with pytest.raises(UsageError):
        entered.leave()
    torch.nn.init.ones_(model.weight)
    entered.tell_replaced("another callback")
    assert "has replaced it" not in caplog.text


@row("a schedule that begins anew in a run under way", "told", "`swarm.catch_up(scheduler)`")
@pytest.mark.parametrize("kind", ["lambda", "warm-up, then cosine", "chained"])
def test_a_schedule_that_stays_behind_is_told(kind, tmp_path):
    model = torch.nn.Linear(2, 1)

    def train(steps: int, *, catches_up: bool, state: Any = None, out: Path | None = None) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler, swarm = KINDS[kind](optimizer), Swarm(model, optimizer, inner_steps=2, out=out)
        if state is not None:
            swarm.load_state_dict(state)
        with swarm:
            if catches_up:
                swarm.catch_up(scheduler)
            for _ in range(steps):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                scheduler.step()
            return swarm.state_dict()

    state = train(12, catches_up=False, out=tmp_path / "begins")
    for catches_up in (False, True):
        train(3, catches_up=catches_up, state=state, out=tmp_path / f"{catches_up}")
    said = {each.name: (each / "events.jsonl").read_text() for each in tmp_path.iterdir()}
    told = {name: text.count("swarm.catch_up(scheduler)") for name, text in said.items()}
    assert told == {"begins": 0, "False": 1, "True": 0}
