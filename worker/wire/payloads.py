"""A payload cut into frames, and put together from those that arrive.

A contributor commits itself to a root over the hashes of the leaves of its shard. A leaf is a range
of values, on whole blocks of the codecs: about a 64th of the shard, or a 32nd without blocks. By
the root, and as few hashes as the tree is deep, a leaf is known to be the one that was meant.
Hashes are BLAKE2b, of 16 bytes; a node without a neighbour is its own parent. Where norms of shards
are announced, each node comes with the sum of the squares below it, in order: `sum` rounds
otherwise in other versions of Python. The root covers these norms and what the contribution counts.
"""

import copy
import math
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise

import numpy as np
import zstandard
from google.protobuf.message import Message

from murmuration.algorithms.codecs import Codec
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import MAX_WINDOW_BYTES
from murmuration.worker.wire.tensors import Again, WireError, hash64, norms_of

Kind = type[Message]  # one that has a field `frame`

MAX_FRAME_BYTES = 1024 * 1024
_MOST_COLUMNS = 8


@dataclass(frozen=True)
class Payload:
    """The encoding of a shard, ready to be sent any number of times. `packed` holds zstd of each
    frame where that is smaller, and None where it is not; nothing where none was tried."""

    raw: memoryview
    hash: int
    packed: tuple[bytes | None, ...] = ()
    unit_bytes: int = 1

    @classmethod
    def of(cls, raw: memoryview, *, compress: bool = False, unit_bytes: int = 1) -> "Payload":
        """Hashes, and compresses frame by frame if asked to, `Codec.unit_bytes` regarded."""
        if not compress:
            return cls(raw, hash64(raw))
        pieces = [raw[at : at + MAX_FRAME_BYTES] for at in range(0, len(raw), MAX_FRAME_BYTES)]
        packed = zip((pack(piece, unit_bytes) for piece in pieces), pieces, strict=True)
        smaller = tuple(z if len(z) < len(piece) else None for z, piece in packed)
        return cls(raw, hash64(raw), smaller, unit_bytes)

    def unpacked(self) -> "Payload":
        """Without what zstd made of it, in half the memory: for one that rarely sends it again."""
        return Payload(self.raw, self.hash)

    @property
    def packed_bytes(self) -> int:
        if not self.packed:
            return len(self.raw)
        starts = range(0, len(self.raw), MAX_FRAME_BYTES)
        frames = zip(starts, self.packed, strict=True)
        return sum(len(piece or self.raw[at : at + MAX_FRAME_BYTES]) for at, piece in frames)


def frame_messages(
    kind: Kind, parts: Iterable[memoryview], offset: int = 0, frame_bytes: int = 0
) -> Iterator[tuple[bytes, int]]:
    """Cuts the parts, one after another, into frames of at most `frame_bytes` (or 1 MiB) from
    `offset` on. Yields each as a serialised message of the kind, and the size of its payload."""
    base, most = 0, frame_bytes or MAX_FRAME_BYTES
    for part in parts:
        for start in range(max(0, offset - base), len(part), most):
            piece = part[start : start + most]
            yield frame_message(kind, base + start, piece), len(piece)
        base += len(part)


def payload_messages(
    kind: Kind, payload: Payload, offset: int = 0, frame_bytes: int = 0
) -> Iterator[tuple[bytes, int, int]]:
    """The frames of a payload from `offset` on; compressed ones begin at multiples of 1 MiB, others
    are of at most `frame_bytes` where that is not 0. Yields each as a serialised message, the size
    of what it carries, and how much of the raw payload that stands for."""
    if not payload.packed or offset % MAX_FRAME_BYTES:
        for message, size in frame_messages(kind, [payload.raw], offset, frame_bytes):
            yield message, size, size
        return
    for start in range(offset, len(payload.raw), MAX_FRAME_BYTES):
        raw = payload.raw[start : start + MAX_FRAME_BYTES]
        piece = payload.packed[start // MAX_FRAME_BYTES]
        if piece is None:
            yield frame_message(kind, start, raw), len(raw), len(raw)
        else:
            message = frame_message(kind, start, memoryview(piece), len(raw), payload.unit_bytes)
            yield message, len(piece), len(raw)


class Incoming:
    """A payload of known size and hash, arriving in frames; resumes where it broke off. Args: held:
    all of it, where it is here already."""

    def __init__(self, total_bytes: int, whole_hash: int, held: memoryview | None = None) -> None:
        self.total_bytes, self.hash = total_bytes, whole_hash
        self.raw = memoryview(bytearray(total_bytes)) if held is None else held
        self.received_bytes = 0 if held is None else total_bytes

    def part(self, begin: int, end: int) -> "Incoming":
        """A part of it that arrives by itself."""
        part = copy.copy(self)
        part.received_bytes, part.total_bytes = begin, end
        return part

    @property
    def complete(self) -> bool:
        return self.received_bytes == self.total_bytes

    def add(self, frame: pb.Frame) -> tuple[int, int]:
        """Takes a frame; returns the size of what it carried, and of what that stands for. Raises
        Again: it is out of place, too large, or its bytes have changed."""
        carried = frame.payload  # once: each access makes a copy
        size = frame.raw_bytes or len(carried)
        if frame.offset != self.received_bytes:
            raise Again(f"a frame at {frame.offset}, expected {self.received_bytes}")
        fits = 0 < size <= min(MAX_FRAME_BYTES, self.total_bytes - frame.offset)
        if not fits or len(carried) > MAX_FRAME_BYTES:
            raise Again(f"a frame of {size} bytes at {frame.offset} of {self.total_bytes}")
        if hash64(carried) != frame.hash:
            raise Again(f"the frame at {frame.offset} is damaged: its hash differs")
        payload = unpack(carried, size, frame.columns) if frame.raw_bytes else carried
        self.raw[frame.offset : frame.offset + size] = payload
        self.received_bytes += size
        return len(carried), size

    def verify(self) -> None:
        """Raises Again unless everything is here and has the announced hash."""
        if not self.complete:
            raise Again(f"{self.received_bytes} of {self.total_bytes} bytes arrived")
        if hash64(self.raw) != self.hash:
            raise Again("the payload is damaged: its hash differs")


def frame_message(
    kind: Kind, offset: int, piece: memoryview, raw_bytes: int = 0, columns: int = 1
) -> bytes:
    """A frame as a serialised message of the kind. Field by field, because that copies the payload
    once where the generated code does thrice; 0 is left out."""
    outer = kind.DESCRIPTOR.fields_by_name["frame"].number
    at = b"\x08" + _varint(offset) if offset else b""
    head = at + b"\x12" + _varint(len(piece))
    tail = b"\x19" + hash64(piece).to_bytes(8, "little")
    tail += b"\x20" + _varint(raw_bytes) if raw_bytes else b""
    tail += b"\x28" + _varint(columns) if columns > 1 else b""
    size = _varint(len(head) + len(piece) + len(tail))
    return b"".join((bytes((outer << 3 | 2,)), size, head, piece, tail))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class _Contexts(threading.local):
    """One of each a thread: making one takes longer than a small frame does."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(units: memoryview, unit_bytes: int) -> bytes:
    """zstd of the columns of units: first the first byte of every one, then the second, ... Each
    column begins a block of its own, so that its bytes are coded by their own frequencies."""
    compressor = _contexts.compressor
    whole = len(units) // unit_bytes * unit_bytes if unit_bytes > 1 else 0
    if whole == 0:
        return compressor.compress(units)
    flat, stream = np.frombuffer(units, np.uint8), compressor.compressobj(size=len(units))
    packed = []
    for column in np.ascontiguousarray(flat[:whole].reshape(-1, unit_bytes).T):
        packed.append(stream.compress(column.tobytes()))
        packed.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
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
    whole = len(plain) // columns * columns if columns > 1 else 0
    if whole == 0:
        return memoryview(plain)
    flat = np.frombuffer(plain, np.uint8)
    units = flat[:whole].reshape(columns, -1).T.ravel()
    return np.concatenate((units, flat[whole:])).data


HASH_BYTES = 16
ROUNDED = 1 + 2**-7  # a norm, and one of sums that are rounded
_LEAVES, _CHILDREN = 64, 4
_BEGUN = {
    kind: blake2b(digest_size=HASH_BYTES, person=kind) for kind in (b"leaf", b"node", b"root")
}
_FEWEST, _MOST = 64, 64 * 1024  # values in a leaf, where the shard has as many


@dataclass(frozen=True)
class Leaves:
    """The ranges of a shard of `elements` values, of `size` each but for the last."""

    elements: int
    size: int

    @classmethod
    def of(cls, elements: int, codecs: Sequence[Codec]) -> "Leaves":
        """Args: elements: of the shard, integers not among them; codecs: that it travels in."""
        block = max(codec.block_elements for codec in codecs)
        size = min(max(_FEWEST, -(-elements // (_LEAVES if block > 1 else _LEAVES // 2))), _MOST)
        return cls(elements, -(-size // block) * block)

    @property
    def count(self) -> int:
        return -(-self.elements // self.size)

    def bounds(self, leaf: int) -> tuple[int, int]:
        return leaf * self.size, min(self.elements, (leaf + 1) * self.size)


class Commitment:
    """One peer's contribution to a shard, or what its encoding of a mean has left over; of either
    it can show any leaf. Any thread. Args: weight: what it counts; 0 for what is left over; norms:
    that it announces of its shards; of_leaves: `norms_of` them, where they are known."""

    def __init__(
        self,
        codec: Codec,
        leaves: Leaves,
        payload: memoryview,
        weight: int,
        norms: Sequence[float] = (),
        of_leaves: Sequence[float] = (),
    ) -> None:
        starts = range(0, leaves.elements, leaves.size)
        cuts = [codec.encoded_bytes(at) for at in (*starts, leaves.elements)]
        self._values = [payload[start:stop] for start, stop in pairwise(cuts)]
        sized = payload, leaves.elements, leaves.size
        level = _leaves(self._values, of_leaves or (norms and norms_of(codec, *sized)))
        self._levels = [level]
        while len(level) > 1:
            level = [_parent(level[at : at + _CHILDREN]) for at in range(0, len(level), _CHILDREN)]
            self._levels.append(level)
        self.norms, self.norm = norms, math.sqrt(_squares(level[0])) if level else 0.0
        self.root = _root(level[0] if level else b"", weight, norms)

    def shown(self, leaf: int) -> tuple[bytes, list[bytes]]:
        """The encoded values of a leaf, and its neighbours on the way to the root. Raises
        WireError: there is no such leaf."""
        if leaf >= len(self._values):
            raise WireError(f"leaf {leaf} of {len(self._values)}")
        path, at = [], leaf
        for level in self._levels[:-1]:
            first = at - at % _CHILDREN
            path += level[first:at] + level[at + 1 : first + _CHILDREN]
            at //= _CHILDREN
        return bytes(self._values[leaf]), path


def root_of(
    codec: Codec,
    leaves: Leaves,
    leaf: int,
    payload: bytes,
    path: Sequence[bytes],
    weight: int,
    norms: Sequence[float] = (),
    place: int = 0,
) -> bytes:
    """The root that a shown leaf leads to; empty if the path does not fit, or has more squares than
    the norm at this place."""
    (start, stop), count = leaves.bounds(leaf), leaves.count
    try:
        shown = memoryview(bytearray(payload))
        of_leaf = norms_of(codec, shown, stop - start, leaves.size) if norms else ()
        (found,) = _leaves([shown], of_leaf)
    except WireError:
        return b""
    rest = list(path)
    if any(len(each) != len(found) or _squares(each) < 0 for each in rest):
        return b""
    while count > 1:
        place_in = leaf % _CHILDREN
        others = min(_CHILDREN, count - leaf + place_in) - 1
        if len(rest) < others:
            return b""
        found = _parent([*rest[:place_in], found, *rest[place_in:others]])
        rest, leaf, count = rest[others:], leaf // _CHILDREN, -(-count // _CHILDREN)
    # Of squares less than 2**-110 may well be 0 in fp32.
    most = (ROUNDED * norms[place]) ** 2 + 2**-110 if place < len(norms) else 0.0
    return _root(found, weight, norms) if not rest and _squares(found) <= most else b""


def _leaves(values: Iterable[memoryview], norms: Sequence[float]) -> list[bytes]:
    """Leaves of the tree, as its nodes are: a hash, and where norms are known the sum of squares,
    to eight bits: so that all machines find the same."""
    hashes = [_hash(b"leaf", each) for each in values]
    parts, powers = np.frexp(np.square(np.asarray(norms, "<f8")))
    sums = np.ldexp(np.rint(parts * 2**8) / 2**8, powers).astype("<f8").tobytes()
    return [each + sums[8 * at : 8 * at + 8] for at, each in enumerate(hashes)]


def _squares(node: bytes) -> float:
    return struct.unpack_from("<d", node, HASH_BYTES)[0] if len(node) > HASH_BYTES else 0.0


def _parent(children: Sequence[bytes]) -> bytes:
    if len(children) == 1:
        return children[0]
    nodes, summed = b"".join(children), len(children[0]) > HASH_BYTES
    sums = [*accumulate(struct.unpack(f"<{'16xd' * len(children)}", nodes))] if summed else []
    return _hash(b"node", nodes) + (struct.pack("<d", sums[-1]) if summed else b"")


def _root(top: bytes, weight: int, norms: Sequence[float]) -> bytes:
    said = np.asarray(norms, "<f4").tobytes()
    return _hash(b"root", top + weight.to_bytes(8, "little") + said)


def _hash(kind: bytes, of: bytes | memoryview) -> bytes:
    begun = _BEGUN[kind].copy()  # takes less than to begin anew
    begun.update(of)
    return begun.digest()
