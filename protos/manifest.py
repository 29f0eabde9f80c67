"""What makes two manifests the same: their canonical msgpack, and the name of a run made of it.

Values are equal when their bytes are: 1 and 1.0 differ, and so do 1 and True.
"""

from collections.abc import Mapping
from typing import Any

import msgpack
import xxhash

from murmuration.protos.documents import MANIFEST_BYTES, BadDocument, unpack

_MAX_SHOWN = 60


def in_key_order(value: Any) -> Any:
    """Nested dicts, lists and scalars, with the keys of every dict sorted."""
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
    """What all peers of the run have in common: all but the advice, in which they may differ."""
    return {key: value for key, value in manifest.items() if key != "advice"}


def run_hash(manifest: Mapping[str, Any]) -> int:
    """64 bits that name the run: xxh3 of the canonical msgpack of what is agreed."""
    return xxhash.xxh3_64_intdigest(canonical(agreed(manifest)))


def run_name(manifest: bytes) -> str:
    """The run's hash in hex, of a packed manifest. Raises BadDocument."""
    return f"{run_hash(unpack(manifest, MANIFEST_BYTES)):016x}"


def manifest_difference(run: bytes, yours: bytes) -> str | None:
    """Compares a caller's packed manifest with the run's.

    Equal documents may come as different bytes, from another version of zstd.

    Returns:
        None when they agree, or a line that names the first differing key.
    """
    if run == yours:
        return None
    try:
        theirs = unpack(yours, MANIFEST_BYTES)
    except BadDocument as error:
        return f"the manifest cannot be read: {error}"
    found = first_difference(
        agreed(unpack(run, MANIFEST_BYTES)), agreed(theirs), here="in this run", there="in yours"
    )
    return f"the manifest is not this run's: {found}" if found else None


def first_difference(
    a: object, b: object, *, here: str = "here", there: str = "there"
) -> str | None:
    """The first difference of two documents, in key order.

    Returns:
        None when equal, or such as `diloco.inner_steps: 50 here, 25 there`.
    """
    if canonical(a) == canonical(b):
        return None
    path, left, right = _difference(a, b, "")
    return f"{path}: {left} {here}, {right} {there}"


def _difference(a: object, b: object, path: str) -> tuple[str, str, str]:
    """The path of the first difference of two unequal values, and what either side has there."""
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
