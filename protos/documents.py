"""Documents on the wire: zstd of msgpack of plain values, read within bounds.

The sender is not trusted: neither in sizes that headers claim, nor in what a few bytes unfold to.
"""

from typing import Any

import msgpack
import zstandard

# The largest of each kind, uncompressed.
MANIFEST_BYTES = 1024 * 1024
EVENT_BYTES = 1024 * 1024
STATUS_BYTES = 8 * 1024 * 1024

MAX_DEPTH = 16
MAX_CONTAINERS = 200_000  # an empty map is one byte on the wire and 64 in memory
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
    document = _parse(_expand(compressed, max_bytes))
    if not isinstance(document, dict):
        raise BadDocument("not a map with text keys")
    _check_depth(document, MAX_DEPTH)
    return document


def _expand(compressed: bytes, max_bytes: int) -> bytes:
    """Reads through a bounded reader: the size that the zstd header claims is not believed."""
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        with decompressor.stream_reader(compressed) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise BadDocument(f"damaged: {error}") from error
    if len(plain) > max_bytes:
        raise BadDocument(f"larger than {max_bytes} bytes")
    return plain


def _parse(plain: bytes) -> object:
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise BadDocument(f"more than {MAX_CONTAINERS} lists and maps")
        if isinstance(container, dict):
            for key in container:
                if not isinstance(key, str):
                    raise BadDocument(f"not a map with text keys: it has the key {key!r}")
        return container

    try:
        return msgpack.unpackb(plain, strict_map_key=True, object_hook=count, list_hook=count)
    except BadDocument:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise BadDocument(f"not msgpack: {error}") from error


def _check_depth(value: object, depth: int) -> None:
    if depth == 0:
        raise BadDocument(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, depth - 1)
