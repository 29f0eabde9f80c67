"""Documents on the wire: zstd of msgpack of plain values. The sender is not trusted."""

from typing import Any

import msgpack
import zstandard

MAX_DOCUMENT_BYTES = 8 * 1024 * 1024
_MAX_CONTAINERS = 200_000  # an empty map is one byte on the wire and 64 in memory


class BadDocument(ValueError):
    """Bytes that are no acceptable document; says why."""


def pack(document: object) -> bytes:
    """zstd of msgpack."""
    return zstandard.ZstdCompressor(level=3).compress(msgpack.packb(document))


def unpack(compressed: bytes, max_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """The document in `pack`'s bytes. Raises BadDocument."""
    return parse(expand(compressed, max_bytes))


def expand(compressed: bytes, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Decompresses at most `max_bytes`: the size that the zstd header claims is not believed.

    Raises:
        BadDocument: damaged, or larger.
    """
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_DOCUMENT_BYTES)
        with decompressor.stream_reader(compressed) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise BadDocument(f"damaged: {error}") from error
    if len(plain) > max_bytes:
        raise BadDocument(f"larger than {max_bytes} bytes")
    return plain


def parse(raw: bytes) -> dict[str, Any]:
    """A msgpack map with text keys. Raises BadDocument."""
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > _MAX_CONTAINERS:
            raise BadDocument(f"more than {_MAX_CONTAINERS} lists and maps")
        return container

    try:
        document = msgpack.unpackb(raw, strict_map_key=True, object_hook=count, list_hook=count)
    except BadDocument:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise BadDocument(f"not msgpack: {error}") from error
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise BadDocument("not a map with text keys")
    return document
