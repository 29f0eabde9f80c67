"""A loop that saves model, optimizer and swarm at the same moment goes on to the same bits."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from murmuration import Swarm, UsageError
from murmuration.worker.training.outer_state import load_state, save_state, unpacked
from murmuration.worker.wire import tensor_hash
from tests.support.refusals import one_line

H, STEPS = 6, 15
OVERLAPS = {"streaming": 2, "co2": H, "streaming-noloco": 2}
RESUMED = ("streaming", "onebit", "streaming-noloco", "ddp", "local")
Saved = dict[str, Any]


class Loop:
    """A model with two layers and running statistics, and AdamW over it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, number: int) -> None:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        loss = (self.model(inputs).squeeze(-1) - inputs.sum(-1).sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self, swarm: Swarm) -> Saved:
        model, optimizer = (deepcopy(e.state_dict()) for e in (self.model, self.optimizer))
        return {"model": model, "optimizer": optimizer, "swarm": swarm.state_dict()}

    def load(self, saved: Saved) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(deepcopy(saved["optimizer"]))


def swarm_of(loop: Loop, preset: str, **changes: Any) -> Swarm:
    settings = {"diloco.overlap_steps": OVERLAPS[preset]} if preset in OVERLAPS else {}
    given = {"inner_steps": None if preset == "ddp" else H, "steps": STEPS, "name": "me", **changes}
    return Swarm(loop.model, loop.optimizer, preset=preset, settings=settings, **given)


def ends(loop: Loop, swarm: Swarm) -> list[str]:
    fragments = swarm.state_dict()["fragments"]
    kinds = [[each[kind] for each in fragments] for kind in ("anchor", "momentum")]
    own = [value.float().flatten() for value in loop.model.state_dict().values()]
    return [tensor_hash(each) for each in (*kinds, own)]


def run(loop: Loop, swarm: Swarm, steps: int = 99) -> list[Saved]:
    """In the swarm to its end, or for so many steps; what was saved after each."""
    saved = []
    while not swarm.done and len(saved) < steps:
        loop.step(swarm.step)
        saved.append(loop.saved(swarm))
    return saved


def resumed(preset: str, saved: Saved, state: Any = None, **changes: Any) -> tuple[Loop, Swarm]:
    """Another process, to the end of the run."""
    loop = Loop()
    loop.load(saved)
    swarm = swarm_of(loop, preset, **changes)
    swarm.load_state_dict(saved["swarm"] if state is None else state)
    with swarm:
        run(loop, swarm)
    return loop, swarm


@pytest.mark.parametrize("preset", RESUMED)
def test_a_loop_goes_on_to_the_same_bits(preset, tmp_path):
    whole = Loop()
    with swarm_of(whole, preset) as first:
        saved = run(whole, first)
    for number in (1, H, H + 1, 2 * H + 1):  # before a round, at one, and with one on its way
        each = saved[number - 1]
        state = load_state(save_state(tmp_path / str(number), each["swarm"]).parent)
        assert unpacked(state)["step"] == number
        assert ends(*resumed(preset, each, state)) == ends(whole, first), number


@pytest.mark.parametrize("preset", RESUMED)
def test_a_run_can_be_prolonged(preset):
    """From a step on the way to the bits of a run that was as long from the beginning; and from its
    end, after which there is a round at each of the schedule's steps again."""
    whole, first = Loop(), Loop()
    with swarm_of(whole, preset, steps=STEPS + 9) as longer:
        run(whole, longer)
    with swarm_of(first, preset) as swarm:
        saved = run(first, swarm)
    for each in (saved[7], saved[-1], first.saved(swarm)):
        again, swarm = resumed(preset, each, steps=STEPS + 9)
        there, here = (unpacked(each.state_dict())["fragments"] for each in (longer, swarm))
        assert [f["version"] for f in here] == [f["version"] for f in there]
        assert swarm.metrics["rounds_failed"] == 0
        assert each is not saved[7] or ends(again, swarm) == ends(whole, longer)


def test_a_state_that_does_not_fit_is_refused_with_the_setting_that_differs():
    loop = Loop()
    with swarm_of(loop, "diloco") as swarm:
        saved = run(loop, swarm, 5)[-1]["swarm"]
    for changes, says in [
        ({"inner_steps": 4}, "diloco.inner_steps: 6 in it, 4 asked for"),
        ({"preset": "noloco"}, "diloco.consensus: False in it, True asked for"),
        ({"settings": {"run.seed": 1}}, "run.seed: 0 in it, 1 asked for"),
        ({"settings": {"diloco.codec": "int8"}}, "diloco.codec: 'fp32' in it, 'int8' asked for"),
        ({"steps": 3}, "is of step 5, and run.steps is 3"),
        ({"turned": True}, "is of another run: tensors: in another order"),
        ({"wider": True}, r"tensors\.0\.bias\[0\]: 8 in it, 9 asked for"),
    ]:
        other = Loop()
        if changes.pop("turned", False):
            other.model._modules = dict(reversed(other.model._modules.items()))
        if changes.pop("wider", False):
            other.model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1))
            other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
        given = {"preset": "diloco", "inner_steps": H, "steps": STEPS, **changes}
        again = Swarm(other.model, other.optimizer, **given)
        with one_line(UsageError, says):
            again.load_state_dict(saved)
    with pytest.raises(UsageError, match="empty, as on all ranks of a site but the first"):
        again.load_state_dict({})
    with pytest.raises(UsageError, match=r"no state of swarm\.state_dict"):
        again.load_state_dict({"step": 3})


def test_a_state_is_not_taken_where_the_model_holds_the_anchor():
    loop = Loop()
    with swarm_of(loop, "diloco") as swarm:
        with swarm.anchor(), pytest.raises(UsageError, match=r"outside of that block"):
            swarm.state_dict()
        assert unpacked(swarm.state_dict())["step"] == 0
        with pytest.raises(UsageError, match="before `with`"):
            swarm.load_state_dict(swarm.state_dict())


@pytest.mark.parametrize("preset", ["diloco", "co2", "streaming"])
def test_a_state_beside_another_model_is_told_and_only_what_it_lacks_counts(preset, caplog):
    """The model was saved with the anchor's values, as for evaluation, and the state without."""
    loop, again = Loop(), Loop()
    with swarm_of(loop, preset) as swarm:
        saved = run(loop, swarm, 8)[-1]["swarm"]
        with swarm.anchor():
            again.model.load_state_dict(loop.model.state_dict())
    second = swarm_of(again, preset)
    second.load_state_dict(saved)
    with second:
        assert "does not hold what it held" in caplog.text
        assert second.step == 8
        assert not any("in_flight" in f for f in unpacked(second.state_dict())["fragments"])
