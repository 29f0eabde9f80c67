"""The parts of a model that travel: trained parameters, and running statistics.

A buffer that is saved with the model, such as BatchNorm's running mean, is averaged at each round,
without momentum, if it is of fp32, bf16 or fp16. Of one of another type, and of a mask of torch's
pruning, all take that of the round's first peer by name, bit for bit.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from murmuration.algorithms.fragments import TensorSpec, limbs_of
from murmuration.worker.errors import UsageError

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_AVERAGED = (torch.float32, torch.bfloat16, torch.float16)
_MASK = "_mask"  # the end of a name: torch's pruning has it
# As safetensors names them: a checkpoint can hold these.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {bare_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def check_types(model: nn.Module) -> None:
    """Raises UsageError: a trained parameter is of a type that an exchange would round."""
    for name, parameter in trained_parameters(model).items():
        if parameter.dtype not in _AVERAGED:
            raise UsageError(
                f"parameter {name!r} is of type {parameter.dtype}: what is trained is exchanged in "
                "fp32, and may be of fp32, bf16 or fp16; call model.float() before the optimizer "
                "is made, or freeze the parameter"
            )


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved with the model: those that are averaged, then limbs of others."""
    exact = integer_buffers(model)
    averaged = {name: b for name, b in _shared_buffers(model).items() if name not in exact}
    return averaged | {name: limbs_of(b) for name, b in exact.items()}


def integer_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Finds those that are saved with the model and travel bit for bit, by name."""
    shared = _shared_buffers(model).items()
    return {n: b for n, b in shared if b.dtype not in _AVERAGED or n.endswith(_MASK)}


def schema_of(model: nn.Module, *, statistics: bool = True) -> list[TensorSpec]:
    """Names and shapes of what travels: parameters, statistics, limbs. Raises as `check_types`."""
    check_types(model)
    found = [TensorSpec(n, tuple(p.shape)) for n, p in trained_parameters(model).items()]
    if statistics:
        kinds = {name: buffer.dtype for name, buffer in integer_buffers(model).items()}
        found += [
            TensorSpec(name, tuple(values.shape), averaged=True, integers=kinds.get(name))
            for name, values in running_statistics(model).items()
        ]
    return found


def buffers_left_out(model: nn.Module, exchanged: Collection[str]) -> dict[str, str]:
    """The saved buffers that are not exchanged, with why they cannot be; empty where they could."""
    saved = saved_buffers(model).items()
    return {name: _why_left(buffer) for name, buffer in saved if name not in exchanged}


def _shared_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in saved_buffers(model).items() if not _why_left(b)}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the model, by name. Not by `state_dict`, whose hooks may
    wait for other ranks."""
    home = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {bare_name(n): buffer for n, buffer in model.named_buffers() if n not in home}


def _why_left(buffer: Tensor) -> str:
    """Why a buffer cannot be exchanged; empty where it can."""
    if buffer.layout is not torch.strided:
        return f"of layout {str(buffer.layout).removeprefix('torch.')}"
    if buffer.dtype not in DTYPES:
        return f"of type {buffer.dtype}"
    sizes = zip(buffer.shape, buffer.stride(), strict=True)
    expanded = any(size > 1 and stride == 0 for size, stride in sizes)
    if buffer.is_conj() or buffer.is_neg() or expanded:
        return "a view that nothing can write to"
    return ""


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while (wrapper := next(filter(name.startswith, _WRAPPERS), None)) is not None:
        name = name.removeprefix(wrapper)
    return name.replace("._orig_mod.", ".")
