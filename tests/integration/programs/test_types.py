"""Programs whose tensors are of other types than fp32, or whose defaults are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import murmuration
from murmuration.worker.library.hooks import UserReplica
from tests.support.peers import Peer, row, run, values

STEPS, INNER_STEPS = 8, 4


def train(peer: Peer, model: nn.Module, **arguments: Any) -> list[float]:
    """Returns the parameters, and the rounds that this peer has completed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {"preset": "diloco", "inner_steps": INNER_STEPS, "steps": STEPS} | arguments
    with murmuration.Swarm(model, optimizer, **given, **peer.arguments) as swarm:
        while not swarm.done:
            inputs = model[0].weight.new_full((4, 3), 1.0 + peer.index)
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        rounds = swarm.metrics["rounds_completed"]
    return [*model[0].weight.detach().float().flatten().tolist(), rounds]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2, dtype=dtype, device="cpu"))


def draws_first_values(peer: Peer, begins: str = "p0") -> list[list[float]]:
    torch.manual_seed(peer.index)
    model = model_of()
    drawn = model[0].weight.flatten().tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    name = peer.name if peer.index else begins
    with murmuration.Swarm(model, optimizer, inner_steps=2, **peer.arguments | {"name": name}):
        return [drawn, model[0].weight.flatten().tolist()]


@row("peers that draw other first parameters", "shared", "all begin with the first peer's by name")
def test_all_begin_with_the_first_values_of_the_first_peer_by_name(tmp_path):
    (drawn, first), (others, second) = values(tmp_path, draws_first_values, draws_first_values)
    assert drawn != others
    assert first == second == drawn


@row(
    "others' first parameters take the place of those of the peer that began the run",
    "told",
    "load the same",
)
def test_one_that_began_the_run_is_told_that_others_first_values_count(tmp_path):
    outcome, other = run(tmp_path, partial(draws_first_values, begins="z"), draws_first_values)
    assert outcome.value[1] == other.value[0]
    assert "the first values of p1 count, and not those here" in outcome.log
    assert "the first values of" not in other.log


def defaults(peer: Peer, preset: str, dtype: str = "float32", device: str = "cpu") -> list[float]:
    """On the device `meta` nothing can be computed."""
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_default_device(device)
    return train(peer, model_of(), preset=preset)


@row("`torch.set_default_dtype`, `torch.set_default_device`", "shared", "as without")
@pytest.mark.parametrize(
    "given",
    [
        {"preset": "streaming", "dtype": "float16"},
        {"preset": "onebit", "dtype": "float64"},
        {"preset": "sparse", "device": "meta"},
    ],
    ids=["fp16", "fp64", "device"],
)
def test_defaults_of_torch_change_nothing(tmp_path, given):
    loop = partial(defaults, **given)
    first, second = run(tmp_path, loop, loop)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    assert first.value[-1] >= 2
    assert "Traceback" not in first.log + second.log


class Tables(nn.Module):
    """Buffers of many types, which the first peer's program changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("short", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        self.register_buffer("long", torch.tensor([1 + 2.0**-40, torch.nan, -torch.inf]).double())
        self.register_buffer("spectrum", torch.tensor([1 + 2j, 3 - 1e-7j]))
        self.register_buffer("eighth", torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn))
        self.register_buffer("seen", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("no_numbers", torch.empty(0, 2, dtype=torch.int64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values


def with_tables(peer: Peer) -> list[str]:
    """Each peer has buffers of its own at the end."""
    model = model_of().append(Tables())
    table = model[1]
    table.long[0] += peer.index
    table.spectrum *= 1j ** (1 + peer.index)
    table.eighth.view(torch.uint8).add_(peer.index)
    table.count += peer.index
    train(peer, model)
    return [f"{name} {value.tolist()}" for name, value in model.named_buffers()]


@row("buffers of fp64, fp8, complex numbers, integers", "shared", "bit for bit, the first peer's")
def test_buffers_of_other_types_travel_bit_for_bit(tmp_path):
    first, second = values(tmp_path, with_tables, with_tables)
    alone = Tables()
    alone.spectrum *= 1j
    held = [f"1.{name} {value.tolist()}" for name, value in alone.named_buffers()]
    assert first == second == held


def prunes(peer: Peer) -> list[Any]:
    """Each peer by a mask of its own."""
    model = model_of()
    prune.identity(model[0], "weight")

    def again(*_: object) -> None:
        model[0].weight_mask[0, peer.index] = 0

    model.register_forward_pre_hook(again)
    train(peer, model)
    return [model[0].weight_mask.tolist(), model[0].weight_orig.tolist()]


@row("pruning within the block, by `torch.nn.utils.prune`", "shared", "by the first peer's masks")
def test_masks_are_no_means_of_masks(tmp_path):
    first, second = values(tmp_path, prunes, prunes)
    assert first == second
    assert first[0] == [[0, 1, 1], [1, 1, 1]]


def with_odd_buffers(peer: Peer) -> list[float]:
    model = model_of()
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    model.register_buffer("same", torch.ones(()).expand(4))
    model.register_buffer("turned", torch.tensor([1j]).conj())
    return train(peer, model)


@row("complex128 or expanded buffers", "told", "they stay on each peer")
def test_buffers_that_cannot_travel_are_named_once(tmp_path):
    first, second = run(tmp_path, with_odd_buffers, with_odd_buffers)
    assert first.value == second.value
    for each in (first, second):
        (line,) = [line for line in each.log.splitlines() if "stay here" in line]
        assert line.startswith("WARNING")
        assert all(name in line for name in ("wide", "same", "turned"))


def parameters_of(dtype: torch.dtype) -> str:
    """The line of `Swarm` about a model whose parameters are of this type."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(murmuration.UsageError) as caught:
        murmuration.Swarm(model, optimizer)
    return str(caught.value)


@row("parameters of fp64, fp8 or complex numbers", "refused", "what is exchanged is fp32")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2], ids=str
)
def test_parameters_that_would_be_rounded_are_refused(dtype):
    said = parameters_of(dtype)
    assert said.startswith(f"parameter 'weight' is of type {dtype}: ")
    assert "model.float()" in said
    assert "\n" not in said


def test_frozen_parameters_may_be_of_any_type():
    def named(value: complex) -> str | None:
        model = model_of()
        model.table = nn.Parameter(torch.tensor([value]), requires_grad=False)
        model.exact = nn.Parameter(torch.zeros(2).double(), requires_grad=False)
        return UserReplica(model, torch.optim.SGD(model[0].parameters(), lr=0.1)).frozen_hash

    assert named(1 + 2j) == named(1 + 2j) != named(1 + 3j)
