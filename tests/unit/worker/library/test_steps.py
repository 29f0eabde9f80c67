"""Which steps of optimizers are one step of the swarm, whoever takes them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from murmuration import Swarm, UsageError
from murmuration.worker.library.hooks import UserReplica
from tests.support.peers import row
from tests.support.refusals import one_line


class Told:
    """The messages to a listener, a letter each."""

    def __init__(self) -> None:
        self.words, self.steps = "", 0

    def _step_begins(self, *, in_closure: bool) -> None:
        self.words += "["

    def _optimizer_joins(self, optimizer: Optimizer, *, late: bool) -> None:
        self.words += "~" if late else "+"

    def _step_ends(self, *, moves: bool) -> None:
        self.words += "]" if moves else "|"
        self.steps += 1

    def _others_step(self, optimizer: Optimizer, tensors: int) -> None:
        self.words += str(tensors)


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@contextmanager
def followed(model: nn.Module, optimizer: Any) -> Iterator[Told]:
    listener = Told()
    with UserReplica(model, optimizer).followed(listener) as steps:
        yield listener
        steps.finish()


def optimizers_of(model: nn.Module) -> dict[str, Optimizer]:
    d, g = (SGD(part.parameters(), lr=0.1) for part in model.children())
    foreign = [*nn.Linear(1, 1).parameters()]
    x, y = SGD(foreign, lr=0.1), SGD([*d.param_groups[0]["params"], *foreign], lr=0.1)
    return {"d": d, "g": g, "D": copy.copy(d), "x": x, "y": y}


@row("a copy of the optimizer, or another over the same parameters", "shared", "its steps count")
@row("parameters beside the model's, in an optimizer that steps both", "told", "they stay here")
@pytest.mark.parametrize(
    ("steps", "given", "told", "count"),
    [
        pytest.param("ddd", "d", "[][][]", 3, id="one"),
        pytest.param("dgdg", "dg", "[+][+]", 2, id="two in turns"),
        pytest.param("gdgd", "dg", "[+][+]", 2, id="the second first"),
        pytest.param("dddgdddg", "dg", "[|[][]~[|[][]~", 6, id="a critic thrice"),
        pytest.param("ddgddg", "dg", "[|[]~[|[]~", 4, id="twice"),
        pytest.param("dddd", "dg", "[|[][][]", 4, id="one of two alone"),
        pytest.param("d", "dg", "[]", 1, id="one of two once"),
        pytest.param("DDDD", "d", "[|[][][]", 4, id="a copy"),
        pytest.param("ddDD", "d", "[][][|[]", 4, id="another from now on"),
        pytest.param("dgddgdg", "dg", "[+][|[]~[+]", 4, id="one is skipped once"),
        pytest.param("xxdxd", "d", "2[][]", 2, id="an optimizer of another model"),
        pytest.param("dyy", "d", "[]2[|[]", 3, id="one of the model and more"),
    ],
)
def test_the_optimizer_that_steps_most_often_counts(steps, given, told, count):
    model = model_of()
    optimizers = optimizers_of(model)
    with followed(model, [optimizers[each] for each in given]) as listener:
        for each in steps:
            optimizers[each].step()
        if steps == "d":  # of two, whose step goes on
            assert listener.steps == 0
    optimizers["d"].step()  # nobody listens any more
    assert (listener.words, listener.steps) == (told, count)


def test_an_optimizer_within_another_and_one_that_fails_count_once():
    model = model_of()

    class Twice(Optimizer):
        """As sharpness-aware minimization: a half step of its own, then the base's."""

        def __init__(self, base: Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Callable[[], object] | None = None) -> None:
            if closure is not None:
                closure()
            self.base.step()

    def fail() -> None:
        raise ZeroDivisionError

    twice = Twice(SGD(model.parameters(), lr=0.1))
    with followed(model, twice) as listener:
        twice.step()
        for _ in range(2):
            twice.step()
            with pytest.raises(ZeroDivisionError):
                twice.step(fail)
    assert listener.words == "[+][+][[+]["


def test_a_step_that_a_cuda_graph_captures_is_refused(monkeypatch):
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with followed(model, optimizer) as listener:
        with pytest.raises(UsageError, match="CUDA graph, whose replays no swarm sees: capture"):
            optimizer.step()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        optimizer.step()
    assert listener.words == "[]"


def test_a_step_by_super_is_one_step():
    model = model_of()

    class Own(SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    SGD(model.parameters(), lr=0.1)  # torch follows its own step by now
    with followed(model, own := Own(model.parameters(), lr=0.1)) as listener:
        own.step()
        own.step()
    assert listener.words == "[][]"


@row("layers that are frozen within the block", "told", "the outer step still moves them")
def test_layers_that_stay_frozen_in_the_block_are_told(tmp_path, capsys):
    model = model_of()
    optimizer = optimizers_of(model)["d"]
    with Swarm(model, optimizer, steps=99, inner_steps=2, out=tmp_path, progress=True):
        for frozen in (False, True, True, True):
            model[1].requires_grad_(not frozen)
            optimizer.step()
            optimizer.step()
    told = (tmp_path / "events.jsonl").read_text()
    assert told.count("'1.bias' and 1 more stay frozen in the swarm") == 1
    assert "left the run at step 8 of 99" in capsys.readouterr().out


@row("steps before the block, or around a Swarm that is never entered", "told", "once")
@row("steps after the block", "told", "they are this peer's own")
@row("frozen parameters that a loop moves (a target network)", "told", "make them buffers")
@row("a loop within a generator that is dropped", "told", "its block ends there")
@row("the same, closed by `contextlib.closing` because of an error", "told", "as an error")
@row("`copy.deepcopy` or `pickle` of a Swarm", "refused", "save its `state_dict()`")
def test_what_a_loop_does_around_its_steps_is_told(tmp_path):
    model = model_of()
    optimizer = optimizers_of(model)["d"]
    model[1].requires_grad_(False)

    def train() -> Iterator[None]:
        swarm = Swarm(model, optimizer, out=tmp_path)
        for _ in range(2):
            optimizer.step()
        with one_line(UsageError, "no Swarm can be copied or pickled"):
            copy.deepcopy(swarm)
        with swarm:
            model[1].weight.data.mul_(2)
            yield

    for _ in train():
        break
    with suppress(ZeroDivisionError), closing(train()) as steps:
        raise ZeroDivisionError(next(steps))
    told = (tmp_path / "events.jsonl").read_text()
    for each in ("steps before `with", "steps after the block", "a merge LoRA's base differs"):
        assert told.count(each) == 1 + ("before" in each), told  # there once in each Swarm
    assert (told.count("generator is closed"), told.count('"left"')) == (1, 1)
