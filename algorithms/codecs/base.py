"""The interface of a wire codec."""

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """Turns fp32 values into bytes and back, block by block.

    Values are encoded in blocks of `block_elements`: the encoding of a range that starts at a
    multiple of it is that range of the whole's encoding, so shards and frames can be coded apart.
    """

    @property
    def name(self) -> str: ...

    @property
    def wire_id(self) -> int: ...

    @property
    def block_elements(self) -> int: ...

    def encoded_bytes(self, elements: int) -> int:
        """Size of the encoding of `elements` values."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """1-D contiguous fp32 -> 1-D uint8 of `encoded_bytes`; may share memory with `values`."""
        ...

    def decode(self, raw: Tensor, elements: int) -> Tensor:
        """1-D uint8 -> 1-D fp32 of `elements`; may share memory with `raw`.

        Raises:
            ValueError: the number of bytes does not fit `elements`.
        """
        ...


def check_size(codec: Codec, raw: Tensor, elements: int) -> None:
    """Raises ValueError unless `raw` is the encoding of `elements` values, by size."""
    expected = codec.encoded_bytes(elements)
    if raw.numel() != expected:
        raise ValueError(
            f"{codec.name}: {elements} values take {expected} bytes, got {raw.numel()}"
        )
