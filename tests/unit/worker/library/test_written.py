"""A program's writes into parameters beside its steps, and copies of them: told, or right."""

import atexit
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from murmuration import Swarm, UsageError
from tests.support.peers import row
from tests.support.refusals import one_line

H, STEPS = 4, 10
ONES = torch.ones(2, 3)


class OwnWeights(SGD):
    """Steps weights of its own, at no rate, and copies them into the parameters."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0].pop("lr", None)
        self.param_groups[1:] = [{"params": [], "lr": None}]  # as Hugging Face's Adafactor
        for p in self.param_groups[0]["params"]:
            own = self.state[p].setdefault("own", p.detach().clone())
            p.data.copy_(own.sub_(0.01 * p.grad))


class ItsOwnMemory(SGD):
    """Keeps what is the parameter itself, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data


class ScheduleFree(OwnWeights):
    def eval(self) -> None:
        for p in self.state:
            p.data.copy_(self.state[p]["own"])


class Loop:
    """A loop that does something at a place: -1 is before the first step, then after each step."""

    def __init__(self, folder: Path, steps: type[Optimizer] = SGD) -> None:
        torch.manual_seed(0)
        self.model, self._folder = nn.Linear(3, 2), folder
        self.optimizer = steps(self.model.parameters(), lr=0.01)  # type: ignore[call-arg]  # all of torch's have it
        self.saved = copy.deepcopy(self.model.state_dict())

    def warnings(self, does: Callable[["Loop", int], object] = lambda *_: None) -> str:
        with Swarm(self.model, self.optimizer, inner_steps=H, out=self._folder):
            does(self, -1)
            for number in range(STEPS):
                self.model(ONES).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                does(self, number)
        lines = (self._folder / "events.jsonl").read_text().splitlines()
        return "".join(line for line in lines if '"event": "warning"' in line)


def draws_first_values(loop: Loop, place: int) -> None:
    if place == -1:
        nn.init.normal_(loop.model.weight)


def goes_back_once(loop: Loop, place: int) -> None:
    if place == H + 1:
        loop.model.load_state_dict(loop.saved)


def goes_back_at_the_end(loop: Loop, place: int) -> None:
    if place == STEPS - 1:
        loop.model.load_state_dict(loop.saved)


@row("first values, or a checkpoint, that the block itself loads", "told", "load before the block")
@row(
    "the best weights, or an average, put back at the block's end", "told", "do it after the block"
)
@row("a rollback, a learning rate finder, a layer's reset within the block", "told", "once")
@pytest.mark.parametrize(
    ("does", "told"),
    [
        (goes_back_once, f"written after step {H + 2} of the block"),
        (draws_first_values, "written before the first step of the block"),
        (goes_back_at_the_end, "written after the last step of the block"),
    ],
)
def test_parameters_that_are_written_around_the_steps_are_told(tmp_path, does, told):
    assert Loop(tmp_path).warnings(does).count("the parameters were written") == 1
    assert told in (tmp_path / "events.jsonl").read_text()


def clamps(loop: Loop, place: int) -> None:
    with torch.no_grad():
        loop.model.weight.clamp_(-0.2, 0.2)


def clamps_in_epochs(loop: Loop, place: int) -> None:
    if place % 3 == 0:
        clamps(loop, place)


def swaps_for_a_look(loop: Loop, place: int) -> None:
    kept = copy.deepcopy(loop.model.state_dict())
    loop.model.load_state_dict(loop.saved)
    loop.model.load_state_dict(kept)


def casts(loop: Loop, place: int) -> None:
    if place == -1:
        loop.model.to(torch.bfloat16).to(torch.float32)


@row("two half steps (SAM)", "shared", "a step is what the optimizer's `step` is")
@pytest.mark.parametrize("does", [clamps, clamps_in_epochs, swaps_for_a_look, casts])
def test_a_loop_that_writes_as_a_part_of_its_steps_is_not_warned(tmp_path, does):
    assert Loop(tmp_path).warnings(does) == ""


@row("an optimizer with weights of its own (fp32 masters)", "told", "it undoes each round")
def test_an_optimizer_that_keeps_weights_is_told_once(tmp_path):
    assert Loop(tmp_path / "own", OwnWeights).warnings().count("own weights undo each round") == 1
    for steps in (torch.optim.ASGD, torch.optim.Adam, ItsOwnMemory):
        assert Loop(tmp_path / steps.__name__, steps).warnings() == ""


@row("L-BFGS", "shared", "a round ends what it knows of the curvature")
def test_l_bfgs_takes_no_round_for_its_own_step():
    model = nn.Linear(3, 1)
    optimizer = LBFGS(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ONES).square().sum()
        loss.backward()
        return loss

    with Swarm(model, optimizer, inner_steps=2):
        for knows in (True, False, True, False):
            optimizer.step(closure)
            assert bool(optimizer.state) == knows


@row("`sys.exit()`, Ctrl-C or an error within the block", "told", "how many steps no round has")
@row("a second Ctrl-C, while the block ends", "told", "the model is this peer's own")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("error", [SystemExit(0), TimeoutError("time is up")])
def test_steps_that_are_lost_by_an_exit_are_told(early, error, tmp_path, monkeypatch):
    def exits(loop: Loop | None, place: int = H + 1) -> None:
        if place == H + 1:
            raise error

    if not early:
        monkeypatch.setattr(Swarm, "_end", exits)
    with pytest.raises(type(error)):
        Loop(tmp_path).warnings(exits if early else lambda *_: None)
    how, lost = ("", 2) if early else (" early, and the model is this peer's own", STEPS % H)
    told = f"{error!r} ends the block{how}: its last {lost} steps are in no round"
    assert told in (tmp_path / "events.jsonl").read_text()


@row("a relative `out=`, and `os.chdir` before the block", "shared", "the folder of then")
@row("a program that ends within the block", "told", "a warning says how many steps no round has")
def test_a_program_that_ends_within_the_block_says_so(tmp_path, monkeypatch):
    ends, loop = list[Callable[[], None]](), Loop(tmp_path)
    monkeypatch.setattr(atexit, "register", ends.append)
    monkeypatch.chdir(tmp_path)
    swarm = Swarm(loop.model, loop.optimizer, out="o")
    monkeypatch.chdir("/")
    with swarm:
        loop.optimizer.step()
        ends.pop()()
    for told in ("ends within the block of a Swarm", "its last 1 steps are in no round"):
        assert told in (tmp_path / "o" / "events.jsonl").read_text()


@row("a second model outside the swarm (a GAN's critic)", "told", "a warning says how to add it")
@row("a copy of the model with an optimizer of its own, as in meta-learning", "told", "once")
def test_copies_that_are_trained_beside_the_model_are_told_once(tmp_path):
    def copies(loop: Loop, place: int) -> None:
        clone = copy.deepcopy(loop.model)
        clone(ONES).sum().backward()
        SGD(clone.parameters(), lr=0.01).step()

    assert Loop(tmp_path).warnings(copies).count("SGD steps 2 parameters that are in no swarm") == 1


@row("schedule-free's `eval()` after the block", "shared", "the model stays the anchor")
def test_an_optimizer_that_swaps_weights_leaves_the_anchor_alone(tmp_path):
    loop = Loop(tmp_path, ScheduleFree)
    assert "own weights" not in loop.warnings()
    held = copy.deepcopy(loop.model.state_dict())
    loop.optimizer.eval()
    assert all(torch.equal(held[name], now) for name, now in loop.model.state_dict().items())


@row("parameters that no optimizer steps", "refused", "an error, and the model stays as it is")
@row("`torch.func` loops, which train copies of the parameters", "told", "nothing is shared")
def test_a_block_without_a_step_is_told(tmp_path):
    loop = Loop(tmp_path)
    with Swarm(loop.model, loop.optimizer, inner_steps=H, out=tmp_path):
        pass
    assert "nothing is shared, as no optimizer" in (tmp_path / "events.jsonl").read_text()
    unseen = one_line(UsageError, "the parameters have moved, and no step of an optimizer was seen")
    with unseen, Swarm(loop.model, loop.optimizer):
        nn.utils.vector_to_parameters(torch.zeros(8), loop.model.parameters())
    assert not any(p.any() for p in loop.model.parameters())


@row("a queue of samples or a memory bank in a buffer, as in MoCo", "told", "rounds average it")
@pytest.mark.parametrize("name", ["queue", "average", "counts"])
def test_a_buffer_whose_values_steps_replace_is_told(tmp_path, name):
    loop, buffer = Loop(tmp_path), torch.full((STEPS + 1, 6), float(name != "counts"))
    loop.model.register_buffer(name, buffer)
    value = {"queue": 3.0, "average": 1.01, "counts": 0.2}[name]
    warnings = loop.warnings(lambda _, place: buffer[place].fill_(value))
    assert (f"rounds average the buffers {name}" in warnings) == (name == "queue")
