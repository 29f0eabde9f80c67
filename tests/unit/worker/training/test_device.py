"""Devices by name, batches on their way there, and copies of parameters to the host and back.

`meta` stands for an accelerator, and a stream that copies as late as it may for CUDA's.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from murmuration.algorithms.fragment_state import RoundResult
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import Plan
from murmuration.worker.errors import UsageError
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training.device import Copies, chosen_device, copies_for, device_of, moved
from murmuration.worker.training.fragment import FragmentReplica


def test_auto_is_there_everywhere_and_devices_that_are_none_are_refused() -> None:
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


def test_tensors_are_moved_however_they_are_nested() -> None:
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
        assert held <= 3  # used, arrived next, and the one used before, until it is dropped


@pytest.mark.parametrize("stream", [LateStream(), None])
def test_the_models_stream_waits_for_what_is_written(stream: LateStream | None) -> None:
    parameter = torch.zeros(2, dtype=torch.bfloat16)
    Copies(stream).write(parameter, torch.tensor([1.0, 2.0]))
    assert parameter.tolist() == [1.0, 2.0]
    assert stream is None or not stream.following
    [read] = Copies(stream).read([parameter])
    assert (read is parameter) == (stream is None)  # nothing is copied that is on the host


class CudaStream(NamedTuple):
    """A stream of CUDA's, and its event; notes what it is told."""

    index: int
    told: list[str]

    def wait_stream(self, other: "CudaStream") -> None:
        self.told.append(f"{self.index} waits for {other.index}")

    def record(self, stream: "CudaStream") -> None:
        self.told.append(f"copied on {stream.index}")


def test_each_device_of_a_model_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: CudaStream(device.index, told))
    monkeypatch.setattr(torch.cuda, "Event", lambda: CudaStream(-1, told))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(Tensor, "copy_", lambda *_, **__: None)  # there is no CUDA
    with FakeTensorMode():
        host, *there = (torch.empty(2, device=name) for name in ("cpu", "cuda:0", "cuda:1"))
        side = copies_for([*there, host])._side
        assert side is not None
        for into, source in ((host, there[0]), (host, there[1]), (there[1], host), (host, host)):
            side.copy(into, source)
        assert told == ["copied on 0", "copied on 1", "copied on 1"]
        side.follow()
    assert sorted(told[3:]) == ["0 waits for 0", "1 waits for 1"]


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
