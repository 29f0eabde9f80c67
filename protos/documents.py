"""Documents on the wire: zstd of msgpack of plain values, read within bounds.

The sender is not trusted: neither in sizes that headers claim, nor in what a few bytes unfold to.
"""

from typing import Any

import msgpack
import zstandard

from murmuration.protos.text import shown

# The largest of each kind, uncompressed.
MANIFEST_BYTES = 1024 * 1024
EVENT_BYTES = 1024 * 1024
STATUS_BYTES = 8 * 1024 * 1024
PROFILE_BYTES = 16 * 1024

MAX_DEPTH = 16
# What a document may unfold to, by its size on the wire: an empty map is one byte of msgpack, next
# to nothing as zstd, and 64 bytes in memory.
_FREE_BYTES, _BYTES_PER_BYTE = 64 * 1024, 256
_FREE_CONTAINERS, _CONTAINERS_PER_BYTE = 1000, 16
_MOST_ITEMS = 1 << 17  # of one list or map
_MAX_WINDOW_BYTES = 8 * 1024 * 1024


class BadDocument(ValueError):
    """Bytes that are no acceptable document; says why."""


def pack(document: object) -> bytes:
    """zstd of msgpack."""
    return zstandard.ZstdCompressor(level=3).compress(msgpack.packb(document))


def unpack(compressed: bytes, max_bytes: int) -> dict[str, Any]:
    """The document in `pack`'s bytes: a map, all of whose keys are text.

    Args:
        max_bytes: of the plain document; one of the limits above.

    Raises:
        BadDocument: damaged, too large, nested too deep, or not a map with text keys.
    """
    most_bytes = min(max_bytes, _FREE_BYTES + _BYTES_PER_BYTE * len(compressed))
    return _parse(_expand(compressed, most_bytes), len(compressed))


def unpack_plain(packed: bytes, max_bytes: int) -> dict[str, Any]:
    """As `unpack`, of msgpack that is not compressed."""
    if len(packed) > max_bytes:
        raise BadDocument(f"larger than {max_bytes} bytes")
    return _parse(packed, len(packed))


def _expand(compressed: bytes, max_bytes: int) -> bytes:
    """Reads through a bounded reader: the size that the zstd header claims is not believed."""
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        with decompressor.stream_reader(compressed) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise BadDocument(f"damaged: {shown(str(error))}") from error
    if len(plain) > max_bytes:
        raise BadDocument(f"larger than {max_bytes} bytes")
    return plain


def _parse(plain: bytes, sent_bytes: int) -> dict[str, Any]:
    """Everything is bounded while it is unpacked: the number of containers, by the bytes that were
    sent, and the length that each may claim."""
    most = _FREE_CONTAINERS + _CONTAINERS_PER_BYTE * sent_bytes
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > most:
            raise BadDocument(f"more than {most} lists and maps in {sent_bytes} bytes")
        if isinstance(container, dict):
            for key in container:
                if not isinstance(key, str):
                    raise BadDocument(f"not a map with text keys: it has the key {key!r:.80}")
        return container

    try:
        document = msgpack.unpackb(
            plain,
            strict_map_key=True,
            object_hook=count,
            list_hook=count,
            max_array_len=min(len(plain), _MOST_ITEMS),
            max_map_len=min(len(plain), _MOST_ITEMS),
            max_ext_len=0,
        )
    except BadDocument:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise BadDocument(f"not msgpack: {shown(str(error))}") from error
    if not isinstance(document, dict):
        raise BadDocument("not a map with text keys")
    _check_depth(document, MAX_DEPTH)
    return document


def _check_depth(value: object, depth: int) -> None:
    if depth == 0:
        raise BadDocument(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, depth - 1)
