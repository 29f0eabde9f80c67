"""Documents of plain values as compressed msgpack, read within bounds."""

import msgpack
import zstandard

from worker.wire.errors import WireError
from worker.wire.payloads import MAX_WINDOW_BYTES

MAX_DOCUMENT_BYTES = 1024 * 1024
_MAX_ITEMS = 16 * 1024
_MAX_DEPTH = 16


def pack_document(document: object) -> bytes:
    """A document of plain values as compressed msgpack."""
    return zstandard.ZstdCompressor(level=3).compress(msgpack.packb(document))


def unpack_document(raw: bytes) -> object:
    """Raises WireError when damaged, nested deeply, or larger than a manifest can be.

    The output is read through a bounded reader: the size in the zstd header is not trusted.
    """
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(raw)
        plain = reader.read(MAX_DOCUMENT_BYTES + 1)
        if len(plain) > MAX_DOCUMENT_BYTES:
            raise WireError(f"a document of more than {MAX_DOCUMENT_BYTES} bytes")
        document = msgpack.unpackb(
            plain, strict_map_key=True, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS
        )
    except (zstandard.ZstdError, ValueError, msgpack.UnpackException) as error:
        raise WireError(f"a damaged document: {error}") from error
    _check(document, _MAX_DEPTH)
    return document


def _check(value: object, depth: int) -> None:
    """Raises WireError unless the keys are text and the nesting is shallow."""
    if depth == 0:
        raise WireError(f"a document nested deeper than {_MAX_DEPTH}")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise WireError(f"a document with the key {key!r}")
            _check(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth - 1)
