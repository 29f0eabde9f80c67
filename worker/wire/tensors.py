"""Tensors and their encodings, block by block, so that the loop is never held up for long."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.diloco import mean_in_order
from murmuration.algorithms.robust import norm_of_parts


class WireError(ValueError):
    """A message that does not fit this run; says what and where."""


class Again(WireError):
    """Sending it again may help: bytes were changed or lost on the way, or it came too early."""


BLOCK_ELEMENTS = 256 * 1024  # a thread: 1 MiB of fp32
_EXACT = codec_by_name("fp32")
_NONE = torch.empty(0, dtype=torch.float32, device="cpu")
_NORMED = (torch.float32, torch.bfloat16, torch.float16)  # by torch in one go
_MOST_NORM = 2.0**64
_NOT_FINITE = "the values hold NaN, Inf or absurdly large ones"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def bytes_tensor(raw: memoryview) -> Tensor:
    """A 1-D uint8 tensor over the bytes, without a copy; the buffer must be writable."""
    if len(raw) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8)


def is_finite(values: Tensor) -> bool:
    """Tells whether all of a 1-D fp32 tensor is finite and of sane size (its square sum too)."""
    return math.isfinite(torch.dot(values, values).item())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """The same of tensors of any floating type, shape and device; of a sharded one's shard here."""
    local = (each.to_local() if hasattr(each, "to_local") else each for each in tensors)
    here = [each if each.dtype in _NORMED else each.float() for each in local]
    devices = {each.device for each in here}
    alike = ([each for each in here if each.device == device] for device in devices)
    # Those of a device in one go, before any is looked at: that waits for it.
    norms = [torch.stack(torch._foreach_norm(each, 2, torch.float32)) for each in alike]
    return all(bool((found < _MOST_NORM).all()) for found in norms)  # no comparison holds for a NaN


# Below, `exact` of the last values are limbs of integers. They follow the encoding of the others in
# fp32, whatever the codec is.


@lru_cache(maxsize=1024)
def encoded_bytes(codec: Codec, elements: int, exact: int = 0) -> int:
    return codec.encoded_bytes(elements - exact) + _EXACT.encoded_bytes(exact)


def encode(codec: Codec, values: Tensor, *, exact: int = 0) -> memoryview:
    """The encoding of 1-D fp32 values; may share their memory. Raises ValueError: not finite."""
    if not exact:
        return tensor_bytes(codec.encode(values))
    coded, limbs = values[:-exact], values[-exact:]
    return tensor_bytes(torch.cat((codec.encode(coded), _EXACT.encode(limbs))))


def encoding_error(codec: Codec, payload: memoryview, values: Tensor, *, exact: int = 0) -> Tensor:
    """values - decode(payload), block by block: what an encoding has left out."""
    error = torch.zeros_like(values) if exact else torch.empty_like(values)
    for start, stop in _blocks(values.numel() - exact):
        torch.sub(values[start:stop], _decode(codec, payload, start, stop), out=error[start:stop])
    return error


def check_values(codec: Codec, payload: memoryview, elements: int, *, exact: int = 0) -> float:
    """The norm of encoded values, without integers. Raises WireError: not finite, or too large."""
    norms = norms_of(codec, payload, elements - exact, BLOCK_ELEMENTS)
    if not is_finite(_limbs(codec, payload, elements, exact)):
        raise WireError(_NOT_FINITE)
    return norm_of_parts(norms)


def norms_of(codec: Codec, payload: memoryview, elements: int, size: int) -> list[float]:
    """The norms of encoded values, of `size` each. Raises WireError: no encoder writes these."""
    norms, step = list[float](), max(1, BLOCK_ELEMENTS // size) * size
    for start in range(0, elements, step):
        values = _decode(codec, payload, start, min(elements, start + step))
        whole, rest = len(values) // size, len(values) % size
        rows = values[: whole * size].view(whole, size)
        norms += rows.double().norm(dim=1).tolist()
        norms += [float(values[-rest:].double().norm())] if rest else []
    if not all(each < _MOST_NORM for each in norms):  # as no NaN is
        raise WireError(_NOT_FINITE)
    return norms


def distance(
    codec: Codec, one: memoryview, other: memoryview, elements: int, *, exact: int = 0
) -> float:
    """How far encoded values are from others, without integers."""
    way = average(codec, (one, other), elements, lambda both: torch.sub(*both), exact=exact)
    return float(way[: elements - exact].double().norm())


def average(
    codec: Codec,
    payloads: Sequence[memoryview],
    elements: int,
    mean_of: Callable[[Iterable[Tensor]], Tensor] = mean_in_order,
    *,
    exact: int = 0,
) -> Tensor:
    """The mean of encoded values, in the order given, block by block; integers of the first. Args:
    mean_of: of the decoded values of a block. Raises WireError: the codec's encoder writes no
    such bytes."""
    mean = torch.empty(elements, dtype=torch.float32, device="cpu")
    for start, stop in _blocks(elements - exact):
        mean[start:stop] = mean_of(_decode(codec, payload, start, stop) for payload in payloads)
    mean[elements - exact :] = _limbs(codec, payloads[0], elements, exact)
    return mean


def decode(codec: Codec, payload: memoryview, elements: int, *, exact: int = 0) -> Tensor:
    """Fresh fp32 values, 1-D, block by block. Raises WireError unless finite and of sane size."""
    values = torch.empty(elements, dtype=torch.float32, device="cpu")
    for start, stop in _blocks(elements - exact):
        block = _decode(codec, payload, start, stop)
        if not is_finite(block):
            raise WireError(_NOT_FINITE)
        values[start:stop] = block
    limbs = values[elements - exact :] = _limbs(codec, payload, elements, exact)
    if not is_finite(limbs):
        raise WireError(_NOT_FINITE)
    return values


def state_parts(anchor: Tensor, momentum: Tensor) -> list[memoryview]:
    return [tensor_bytes(anchor), tensor_bytes(momentum)]


def state_bytes(anchor: Tensor, momentum: Tensor) -> memoryview:
    """A copy of both, one after the other."""
    return tensor_bytes(torch.cat((anchor, momentum)))


def split_state(payload: memoryview, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(anchor, momentum) of those bytes, without a copy; `sizes` are their numbers of values."""
    anchor, momentum = torch.split(bytes_tensor(payload).view(torch.float32), list(sizes))
    return anchor, momentum


def _blocks(elements: int) -> Iterator[tuple[int, int]]:
    step = BLOCK_ELEMENTS * torch.get_num_threads()
    for start in range(0, elements, step):
        yield start, min(elements, start + step)


def _limbs(codec: Codec, payload: memoryview, elements: int, exact: int) -> Tensor:
    found = bytearray(payload[codec.encoded_bytes(elements - exact) :])  # a copy: it is aligned
    return _NONE if not (found or exact) else _decode(_EXACT, memoryview(found), 0, exact)


def _decode(codec: Codec, payload: memoryview, start: int, stop: int) -> Tensor:
    """Raises WireError: the codec's encoder writes no such bytes."""
    raw = payload[codec.encoded_bytes(start) : codec.encoded_bytes(stop)]
    try:
        return codec.decode(bytes_tensor(raw), stop - start)
    except ValueError as error:
        raise WireError(str(error)) from error


def hash64(payload: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)


@lru_cache(maxsize=256)  # every offer of a shard asks
def group_hash(group: tuple[str, ...]) -> int:
    """Tells a group that lays out a round from another."""
    return hash64("\n".join(group).encode())


def state_hash(anchor: Tensor, momentum: Tensor, group: Sequence[str]) -> int:
    """Hash of one fragment's committed state: what digests compare."""
    whole = xxhash.xxh3_64(tensor_bytes(anchor))
    whole.update(tensor_bytes(momentum))
    whole.update("\n".join(group).encode())
    return whole.intdigest()


def tensor_hash(tensors: Iterable[Tensor]) -> str:
    """xxh3-128 of some fp32 tensors, as hex: for reports and people."""
    whole = xxhash.xxh3_128()
    for tensor in tensors:
        whole.update(tensor_bytes(tensor))
    return whole.hexdigest()
