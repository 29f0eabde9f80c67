"""Devices by name, batches on their way there, and outer steps beside inner ones."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.errors import UsageError
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training import fragment
from murmuration.worker.training.device import chosen_device, device_of, moved
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.mailbox import RoundDone
from murmuration.worker.wire import state_hash


def test_auto_is_there_everywhere_and_devices_that_are_none_are_refused():
    assert chosen_device("auto").type in ("cpu", "cuda", "mps")
    assert chosen_device("cpu") == torch.device("cpu")
    for name, says in [
        *((name, "use auto, cpu, cuda") for name in ("gpu", "cuda:x", "cpu:1", "", "tpu:0")),
        ("cuda:77", "torch .* sees no such device"),
    ]:
        with pytest.raises(UsageError, match=f"--device {name}: {says}"):
            chosen_device(name)


class Pair(NamedTuple):
    first: Tensor
    second: str


def test_tensors_are_moved_however_they_are_nested():
    value = torch.ones(2)
    inputs = {"ids": value, "more": [value, 3]}
    batch = Batch(inputs, Pair(value, "text"), Cursor(seed=0, stream="a"))
    there = moved(batch, torch.device("meta"))
    assert there.inputs["ids"].is_meta
    assert there.inputs["more"][0].is_meta
    assert there.targets.first.is_meta
    assert (there.inputs["more"][1], there.targets.second) == (3, "text")
    assert there.cursor == batch.cursor
    assert moved(batch, torch.device("cpu")) is batch
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("merge", ["reset", "keep"])
@pytest.mark.parametrize("missed", [(), ((1, 3),)])
def test_a_round_ends_with_the_same_bits_beside_inner_steps_and_by_the_long_way(
    alpha, merge, missed, monkeypatch
):
    ends = []
    for way in ("beside", "in place", "whole"):
        monkeypatch.setattr(fragment, "_BESIDE_ELEMENTS", 0 if way == "beside" else 99)
        if way == "whole":
            monkeypatch.setattr(FragmentReplica, "only_merges", lambda *_: False)
        parameters = {"x": torch.full((1, 2), 10.0), "y": torch.full((2,), 10.0)}
        specs = (TensorSpec("x", (1, 2)), TensorSpec("y", (2,)))
        plan = Plan(outer_lr=1.0, outer_momentum=0.5, merge_alpha=alpha, merge=merge)
        each = FragmentReplica(Fragment(0, specs), plan, parameters)
        parameters["y"].mul_(0.8)
        each.contribute(each.learned(), 1)
        parameters["x"].mul_(0.7)
        mean, error = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
        done = RoundDone(0, mean, 2, ("a", "b"), missed, error, fragment=0)
        each.handle(done)
        assert (each._outcome is not None) == (way == "beside" and not missed)
        each.finish(done)
        assert each.state.hash == state_hash(each.state.anchor, each.state.momentum, ("a", "b"))
        ends.append((each.state.anchor.tolist(), [p.tolist() for p in parameters.values()]))
    assert ends[0] == ends[1] == ends[2]


def test_an_outer_step_that_was_begun_from_another_state_is_made_again(monkeypatch):
    monkeypatch.setattr(fragment, "_BESIDE_ELEMENTS", 0)
    parameters, plan = {"x": torch.zeros(3)}, Plan(outer_lr=1.0, outer_momentum=0.0)
    each = FragmentReplica(Fragment(0, (TensorSpec("x", (3,)),)), plan, parameters)
    each.contribute(each.learned(), 1)
    done = RoundDone(0, torch.ones(3), 2, ("a", "b"), (), fragment=0)
    each.handle(done)
    each.commit(anchor=torch.full((3,), 5.0))  # another peer's, of the same version
    each.finish(done)
    assert each.state.anchor.tolist() == parameters["x"].tolist() == [4.0] * 3


def test_tensors_that_a_loop_puts_in_place_of_others_are_read_and_written():
    parameters, plan = {"x": torch.zeros(3)}, Plan(outer_lr=1.0, outer_momentum=0.0)
    each = FragmentReplica(Fragment(0, (TensorSpec("x", (3,)),)), plan, parameters)
    parameters["x"] = torch.full((3,), 7.0)
    assert each.contribute(each.learned(), 1).g.tolist() == [-7.0] * 3
    each.finish(RoundDone(0, torch.full((3,), -7.0), 2, ("a", "b"), (), fragment=0))
    assert parameters["x"].tolist() == each.state.anchor.tolist() == [7.0] * 3


def test_no_outer_step_is_begun_for_gradients(monkeypatch):
    monkeypatch.setattr(fragment, "_BESIDE_ELEMENTS", 0)
    parameters = {"x": torch.zeros(3)}
    each = FragmentReplica(Fragment(0, (TensorSpec("x", (3,)),)), PRESETS["ddp"], parameters)
    each.contribute(torch.ones(3), 1)
    each.handle(RoundDone(0, torch.ones(3), 2, ("a", "b"), (), fragment=0))
    assert each._outcome is None
