"""A program's choice of torch's default type or device changes no byte of an exchange."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import murmuration.algorithms.codecs
from murmuration.algorithms.codecs import CODECS, Codec
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.worker import wire

ROOT = Path(__file__).parents[4]
MAKERS = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
VALUES = torch.randn(4096 + 300, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def forget_tables() -> None:
    """Those that codecs have made, so that they are made again."""
    for found in pkgutil.iter_modules(
        murmuration.algorithms.codecs.__path__, "murmuration.algorithms.codecs."
    ):
        for each in vars(importlib.import_module(found.name)).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16, "meta"], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[object]:
    """Sets a default type, or a default device on which nothing can be computed."""
    forget_tables()
    before = torch.get_default_dtype()
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)
    torch.set_default_device(None)
    forget_tables()


def coded(codec: Codec) -> tuple[bytes, torch.Tensor]:
    """The encoding, and what it decodes to."""
    raw = wire.encode(codec, VALUES)
    return bytes(raw), wire.decode(codec, memoryview(bytearray(raw)), len(VALUES))


USUAL = {codec.name: coded(codec) for codec in CODECS}


def test_codecs_do_not_depend_on_defaults(default):
    for codec in CODECS:
        (raw, values), (usual, decoded) = coded(codec), USUAL[codec.name]
        assert raw == usual, codec.name
        assert values.dtype is torch.float32, codec.name
        assert torch.equal(values, decoded), codec.name


def test_fragments_are_fp32_on_the_host(default):
    flat = Fragment(0, (TensorSpec("w", (2,)),)).empty()
    assert (flat.dtype, flat.device.type) == (torch.float32, "cpu")


def untyped(path: Path) -> list[int]:
    """The lines of calls that make a tensor without saying of which type."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id == "torch" and call.func.attr in MAKERS)
        and "dtype" not in {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize("package", ["algorithms", "worker"])
def test_no_tensor_is_made_without_a_type(package):
    """A program's `torch.set_default_dtype` would decide what it is of."""
    found = {path: untyped(path) for path in (ROOT / package).rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}
