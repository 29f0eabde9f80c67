"""Devices by name, and batches on their way there; `meta` stands for an accelerator."""

import pytest
import torch
from torch import nn

from worker.errors import UsageError
from worker.tasks import Batch, Cursor
from worker.training.device import chosen_device, device_of, moved


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
