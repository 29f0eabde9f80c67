"""What a frame carries, as zstd of columns of bytes, and back."""

import threading

import numpy as np
import zstandard

from worker.wire.errors import Again

MAX_WINDOW_BYTES = 8 * 1024 * 1024  # of any zstd that is read
_MOST_COLUMNS = 8


class _Contexts(threading.local):
    """One of each a thread: making one takes longer than a small frame does."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(units: memoryview, unit_bytes: int) -> bytes:
    """zstd of the columns of units: first the first byte of every one, then the second, ...

    Each column begins a block of its own, so that its bytes are coded by their own frequencies.
    """
    compressor = _contexts.compressor
    whole = len(units) // unit_bytes * unit_bytes if unit_bytes > 1 else 0
    if whole == 0:
        return compressor.compress(units)
    flat = np.frombuffer(units, np.uint8)
    stream = compressor.compressobj(size=len(units))
    packed = []
    for column in np.ascontiguousarray(flat[:whole].reshape(-1, unit_bytes).T):
        packed += [
            stream.compress(column.tobytes()),
            stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK),
        ]
    return b"".join((*packed, stream.compress(flat[whole:].tobytes()), stream.flush()))


def unpack(packed: bytes, size: int, columns: int) -> memoryview:
    """`size` bytes of zstd; its header is checked before anything is done. Raises Again."""
    try:
        header = zstandard.get_frame_parameters(packed)
        if header.content_size != size or header.window_size > MAX_WINDOW_BYTES:
            raise Again(f"a zstd frame of {header.content_size} bytes, announced as {size}")
        plain = _contexts.decompressor.decompress(
            packed, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise Again(f"a damaged zstd frame: {error}") from error
    if columns > _MOST_COLUMNS:
        raise Again(f"a frame of {columns} columns; at most {_MOST_COLUMNS}")
    return _units(plain, columns)


def _units(columns: bytes, unit_bytes: int) -> memoryview:
    """The units of such columns."""
    whole = len(columns) // unit_bytes * unit_bytes if unit_bytes > 1 else 0
    if whole == 0:
        return memoryview(columns)
    flat = np.frombuffer(columns, np.uint8)
    units = flat[:whole].reshape(unit_bytes, -1).T.ravel()
    return np.concatenate((units, flat[whole:])).data
