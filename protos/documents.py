"""Documents on the wire: zstd of msgpack of plain values, read within bounds: the sender's sizes
are not trusted. And what makes two manifests the same."""

from collections.abc import Mapping
from typing import Any

import msgpack
import xxhash
import zstandard

from murmuration.protos.figures import shown

# The largest of each kind, uncompressed.
MANIFEST_BYTES = 1024 * 1024
STATUS_BYTES = 8 * 1024 * 1024
PROFILE_BYTES = 16 * 1024
MAX_START_MS = 2**53  # ms from 1970: a restart is later by whichever clock

MAX_DEPTH = 16
# What a document may unfold to, by its size on the wire: an empty map is one byte of msgpack, next
# to nothing as zstd, and 64 bytes in memory.
_FREE_BYTES, _BYTES_PER_BYTE = 64 * 1024, 256
_FREE_CONTAINERS, _CONTAINERS_PER_BYTE = 1000, 16
_MOST_ITEMS = 1 << 17  # of one list or map
MAX_WINDOW_BYTES = 8 * 1024 * 1024  # of any zstd that is read
_MAX_SHOWN = 60  # characters of a value that differs


class BadDocument(ValueError):
    """Bytes that are no acceptable document; says why."""


def pack(document: object) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(msgpack.packb(document))


def unpack(compressed: bytes, max_bytes: int) -> dict[str, Any]:
    """The document in `pack`'s bytes. Raises BadDocument: damaged, too large, nested too deep, or
    not a map with text keys. Args: max_bytes: of the plain document; one of the limits above."""
    most_bytes = min(max_bytes, _FREE_BYTES + _BYTES_PER_BYTE * len(compressed))
    try:  # a bounded reader: the size that the zstd header claims is not believed
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        with decompressor.stream_reader(compressed) as reader:
            plain = reader.read(most_bytes + 1)
    except zstandard.ZstdError as error:
        raise BadDocument(f"damaged: {shown(str(error))}") from error
    return _parse(plain, len(compressed), most_bytes)


def unpack_plain(packed: bytes, max_bytes: int) -> dict[str, Any]:
    """As `unpack`, of msgpack that is not compressed."""
    return _parse(packed, len(packed), max_bytes)


def _parse(plain: bytes, sent_bytes: int, max_bytes: int) -> dict[str, Any]:
    """Bounded while it is unpacked: the number of containers, and the length that each claims."""
    if len(plain) > max_bytes:
        raise BadDocument(f"larger than {max_bytes} bytes")
    most = _FREE_CONTAINERS + _CONTAINERS_PER_BYTE * sent_bytes
    longest = min(len(plain), _MOST_ITEMS)
    containers = 0

    def count(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > most:
            raise BadDocument(f"more than {most} lists and maps in {sent_bytes} bytes")
        for key in container if isinstance(container, dict) else ():
            if not isinstance(key, str):
                raise BadDocument(f"not a map with text keys: it has the key {key!r:.80}")
        return container

    try:
        document = msgpack.unpackb(
            plain,
            strict_map_key=True,
            object_hook=count,
            list_hook=count,
            max_array_len=longest,
            max_map_len=longest,
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


# Values are equal when their bytes are: 1 and 1.0 differ, and so do 1 and True.


def in_key_order(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: in_key_order(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [in_key_order(item) for item in value]
    return value


def canonical(value: object) -> bytes:
    """The msgpack of a value with sorted keys."""
    packed: bytes = msgpack.packb(in_key_order(value))
    return packed


def agreed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The values that all peers of the run share: all but the advice, in which they may differ."""
    return {key: value for key, value in manifest.items() if key != "advice"}


def run_hash(manifest: Mapping[str, Any]) -> int:
    """64 bits that name the run: xxh3 of the canonical msgpack of what is agreed."""
    return xxhash.xxh3_64_intdigest(canonical(agreed(manifest)))


def run_name(manifest: bytes) -> str:
    return f"{run_hash(unpack(manifest, MANIFEST_BYTES)):016x}"


def manifest_difference(run: bytes, yours: bytes) -> str | None:
    """A line that names the first key in which a caller's packed manifest differs from the run's,
    if one does. Equal documents may come as different bytes, from another version of zstd."""
    if run == yours:
        return None
    try:
        theirs = agreed(unpack(yours, MANIFEST_BYTES))
    except BadDocument as error:
        return f"the manifest cannot be read: {error}"
    ours = agreed(unpack(run, MANIFEST_BYTES))
    found = first_difference(ours, theirs, here="in this run", there="in yours")
    return f"the manifest is not this run's: {found}" if found else None


def first_difference(a: object, b: object, here: str = "here", there: str = "there") -> str | None:
    """The first difference, in key order: `diloco.inner_steps: 50 here, 25 there`; else None."""
    if canonical(a) == canonical(b):
        return None
    path, left, right = _difference(a, b, "")
    return f"{path}: {left} {here}, {right} {there}"


def _difference(a: object, b: object, path: str) -> tuple[str, str, str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            inner = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                left = _shown(a[key]) if key in a else "missing"
                return inner, left, _shown(b[key]) if key in b else "missing"
            if canonical(a[key]) != canonical(b[key]):
                return _difference(a[key], b[key], inner)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for index, (left_item, right_item) in enumerate(zip(a, b, strict=False)):
            if canonical(left_item) != canonical(right_item):
                return _difference(left_item, right_item, f"{path}[{index}]")
    return path, _shown(a), _shown(b)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a table of {len(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
