"""The hashes by which bytes, groups and states are compared."""

from collections.abc import Iterable, Sequence

import xxhash
from torch import Tensor

from worker.wire.tensors import tensor_bytes


def hash64(payload: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(payload)


def group_hash(group: Sequence[str]) -> int:
    """Hash of the group that lays out a round."""
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
