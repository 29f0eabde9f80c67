"""Whether two manifests agree, and if not, in which key."""

from collections.abc import Mapping

import msgpack
import xxhash

from protos.documents import BadDocument, expand, parse

_MAX_DEPTH = 32
_MAX_SHOWN = 60


def run_name(manifest: bytes) -> str:
    """The run's name: hex of xxh3-64 of the msgpack of what is agreed. Raises BadDocument."""
    return xxhash.xxh3_64_hexdigest(msgpack.packb(_agreed(parse(expand(manifest)))))


def manifest_difference(run: bytes, yours: bytes) -> str | None:
    """Compares a caller's packed manifest with the run's.

    Equal documents may come as different bytes, from another version of zstd.

    Returns:
        None when they agree, or a line that names the first differing key.
    """
    if run == yours:
        return None
    try:
        theirs = _agreed(parse(expand(yours)))
    except BadDocument as error:
        return f"the manifest cannot be read: {error}"
    found = first_difference(
        _agreed(parse(expand(run))), theirs, here="in this run", there="in yours"
    )
    return f"the manifest is not this run's: {found}" if found else None


def _agreed(manifest: object) -> object:
    """Without the advice, in which peers may differ."""
    if not isinstance(manifest, Mapping):
        return manifest
    return {key: value for key, value in manifest.items() if key != "advice"}


def first_difference(
    a: object, b: object, *, here: str = "here", there: str = "there"
) -> str | None:
    """The first difference of two documents, in key order.

    Returns:
        None when equal, or such as `diloco.inner_steps: 50 here, 25 there`.
    """
    found = _difference(a, b, "", _MAX_DEPTH)
    if found is None:
        return None
    path, left, right = found
    return f"{path}: {left} {here}, {right} {there}"


def _difference(a: object, b: object, path: str, depth: int) -> tuple[str, str, str] | None:
    """The path of the first difference, and what either side has there."""
    if depth == 0:
        return path, "nested too deep", "nested too deep"
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}, key=str):
            inner = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                left = _shown(a[key]) if key in a else "missing"
                return inner, left, _shown(b[key]) if key in b else "missing"
            if found := _difference(a[key], b[key], inner, depth - 1):
                return found
        return None
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for index, (left, right) in enumerate(zip(a, b, strict=False)):
            if found := _difference(left, right, f"{path}[{index}]", depth - 1):
                return found
        if len(a) != len(b):
            return path, _shown(a), _shown(b)
        return None
    return None if type(a) is type(b) and a == b else (path, _shown(a), _shown(b))


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a table of {len(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
