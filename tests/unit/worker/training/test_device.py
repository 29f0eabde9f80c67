"""Devices by name, batches on their way there, and copies of parameters to the host and back.

`meta` stands for an accelerator, and a stream that copies as late as it may for CUDA's.
"""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from murmuration.algorithms.fragment_state import RoundResult
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import Plan
from murmuration.worker.errors import UsageError
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training.device import Copies, chosen_device, device_of, moved
from murmuration.worker.training.fragment import FragmentReplica


def test_auto_is_there_everywhere() -> None:
    assert chosen_device("auto").type in ("cpu", "cuda", "mps")
    assert chosen_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:1", "", "tpu:0"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--device {name}: use auto, cpu, cuda"):
        chosen_device(name)


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"--device cuda:77: torch .* sees no such device"):
        chosen_device("cuda:77")


def test_tensors_are_moved_however_they_are_nested() -> None:
    value = torch.ones(2)
    batch = Batch({"ids": value, "more": [value, 3]}, (value, "text"), Cursor(seed=0, stream="a"))
    there = moved(batch, torch.device("meta"))
    assert there.inputs["ids"].is_meta
    assert there.inputs["more"][0].is_meta
    assert there.inputs["more"][1] == 3
    assert there.targets[0].is_meta
    assert there.targets[1] == "text"
    assert there.cursor == batch.cursor
    assert moved(batch, torch.device("cpu")) is batch
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"


class LateStream:
    """A side stream whose copies happen as late as they may; the model's stream is at once."""

    def __init__(self) -> None:
        self.ordered: list[tuple[Tensor, Tensor]] = []
        self.following = False
        self.pinned_tensors: list[weakref.ref[Tensor]] = []

    def pinned(self, like: Tensor) -> Tensor:
        fresh = torch.full_like(like, torch.nan)
        self.pinned_tensors.append(weakref.ref(fresh))
        return fresh

    def follow(self) -> None:
        self.following = True

    def copy(self, into: Tensor, source: Tensor) -> "Copied":
        assert self.following, "a copy must wait for what the model's stream has before it"
        self.ordered.append((into, source))
        return Copied(self, len(self.ordered))

    def lead(self) -> None:
        self.happen(len(self.ordered))
        self.following = False  # the model's stream goes on

    def happen(self, count: int) -> None:
        for into, source in self.ordered[:count]:
            into.copy_(source)
        self.ordered[:count] = [(torch.empty(0), torch.empty(0))] * count


@dataclass(frozen=True)
class Copied:
    """The copies up to this one."""

    stream: LateStream
    count: int

    def synchronize(self) -> None:
        self.stream.happen(self.count)


def test_what_is_read_has_arrived_and_the_next_is_on_its_way() -> None:
    stream = LateStream()
    values = Copies(stream).read([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])])
    assert next(values).tolist() == [1.0]
    waiting = [source.tolist() for _, source in stream.ordered if source.numel()]
    assert waiting == [[2.0]]
    assert [value.tolist() for value in values] == [[2.0], [3.0]]


def test_the_host_holds_two_tensors_of_a_model_and_no_more() -> None:
    stream = LateStream()
    for _ in Copies(stream).read([torch.ones(3) for _ in range(9)]):
        held = sum(each() is not None for each in stream.pinned_tensors)
        assert (
            held <= 3
        )  # used, arrived next, and the one that was used before, until it is dropped


def test_the_models_stream_waits_for_what_is_written() -> None:
    stream, parameter = LateStream(), torch.zeros(2, dtype=torch.bfloat16)
    Copies(stream).write(parameter, torch.tensor([1.0, 2.0]))
    assert parameter.tolist() == [1.0, 2.0]
    assert not stream.following


def test_without_a_stream_nothing_is_copied_that_is_on_the_host() -> None:
    parameter = torch.zeros(2)
    [read] = Copies().read([parameter])
    assert read is parameter
    Copies().write(parameter, torch.ones(2))
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_fragment_through_a_stream_ends_as_without_one(alpha: float) -> None:
    ends = []
    for copies in (Copies(), Copies(LateStream())):
        parameters = {"x": torch.full((1, 2), 10.0), "y": torch.full((2,), 10.0)}
        specs = (TensorSpec("x", (1, 2)), TensorSpec("y", (2,)))
        plan = Plan(outer_lr=1.0, outer_momentum=0.5, merge_alpha=alpha)
        fragment = FragmentReplica(Fragment(0, specs), plan, parameters, copies=copies)
        for parameter in parameters.values():
            parameter.fill_(8.0)
        fragment.contribute(fragment.start - fragment.local, 1)
        mean = torch.tensor([1.0, 2.0, 3.0, 4.0])
        fragment.finish(RoundResult(0, mean, 2, ("a", "b"), ()))
        ends.append([value.tolist() for value in parameters.values()])
    assert ends[0] == ends[1]
