"""Turns tensors and cards into messages and back. Nothing from the network is trusted.

Sizes are checked against what the manifest implies before anything is allocated, then the hash of
each frame, then the hash of the whole, then that the values are finite. Nothing is ever unpickled.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgpack
import numpy as np
import torch
import xxhash
import zstandard
from google.protobuf.message import DecodeError, Message
from torch import Tensor

from algorithms.codecs import Codec
from algorithms.mean import mean_in_order
from protos import murmuration_pb2 as pb
from worker.membership import Card, Digest, Health, Phase
from worker.rounds import ShardKey

MAX_FRAME_BYTES = 1024 * 1024
BLOCK_ELEMENTS = 256 * 1024  # 1 MiB of fp32: short enough not to hold the loop up
MAX_DOCUMENT_BYTES = 1024 * 1024
_MAX_DOCUMENT_ITEMS = 16 * 1024
_MAX_WINDOW_BYTES = 8 * 1024 * 1024
_MAX_DOCUMENT_DEPTH = 16
_MAX_PEERS = 4096
_MAX_NAME_BYTES = 256
_MOST_COLUMNS = 8
_NOT_FINITE = "the values hold NaN, Inf or absurdly large ones"

T = TypeVar("T", bound=Message)


class _Zstd(threading.local):
    """One context each a thread: making one takes longer than a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


class WireError(ValueError):
    """A message that does not fit this run; says what and where."""


class Again(WireError):
    """Sending it again may help: bytes were changed or lost on the way, or it came too early."""


def hash64(payload: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(payload)


def group_hash(group: Sequence[str]) -> int:
    """Hash of the group that lays out a round."""
    return hash64("\n".join(group).encode())


def state_hash(anchor: Tensor, momentum: Tensor, group: Sequence[str]) -> int:
    """Hash of one fragment's committed state: what digests compare."""
    whole = xxhash.xxh3_64(tensor_bytes(anchor))
    whole.update(tensor_bytes(momentum))
    whole.update("\n".join(group).encode())
    return whole.intdigest()


def tensor_hash(tensors: Iterable[Tensor]) -> str:
    """xxh3-128 of some fp32 tensors, as hex: for reports and people."""
    whole = xxhash.xxh3_128()
    for tensor in tensors:
        whole.update(tensor_bytes(tensor))
    return whole.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, without a copy."""
    view: memoryview = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return view


def bytes_tensor(raw: memoryview) -> Tensor:
    """A 1-D uint8 tensor over the bytes, without a copy; the buffer must be writable."""
    if len(raw) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(raw, dtype=torch.uint8)


def is_finite(values: Tensor) -> bool:
    """Whether all of a 1-D fp32 tensor is finite and of sane size (its square sum is finite)."""
    return bool(torch.isfinite(torch.dot(values, values)))


# ------------------------------------------------------------------------- values and payloads


@dataclass(frozen=True)
class Payload:
    """The encoding of a shard, ready to be sent any number of times.

    `packed` holds zstd of each frame where that is smaller, and None where it is not; it is empty
    when compressing was not tried.
    """

    raw: memoryview
    hash: int
    packed: tuple[bytes | None, ...] = ()
    unit_bytes: int = 1

    @classmethod
    def of(cls, raw: memoryview, *, compress: bool = False, unit_bytes: int = 1) -> "Payload":
        """Hashes, and compresses frame by frame if asked to, `Codec.unit_bytes` regarded."""
        if not compress:
            return cls(raw, hash64(raw))
        compressor = _zstd.compressor
        pieces = (
            raw[start : start + MAX_FRAME_BYTES] for start in range(0, len(raw), MAX_FRAME_BYTES)
        )
        packed = ((_pack(compressor, piece, unit_bytes), len(piece)) for piece in pieces)
        smaller = tuple(z if len(z) < size else None for z, size in packed)
        return cls(raw, hash64(raw), smaller, unit_bytes)

    @property
    def packed_bytes(self) -> int:
        """Size on the wire."""
        if not self.packed:
            return len(self.raw)
        starts = range(0, len(self.raw), MAX_FRAME_BYTES)
        return sum(
            len(self.raw[start : start + MAX_FRAME_BYTES]) if piece is None else len(piece)
            for start, piece in zip(starts, self.packed, strict=True)
        )


def encode(codec: Codec, values: Tensor, seed: int | None = None) -> memoryview:
    """The encoding of 1-D fp32 values; may share their memory. Raises ValueError: not finite."""
    return tensor_bytes(codec.encode(values, seed))


def encoding_error(codec: Codec, payload: memoryview, values: Tensor) -> Tensor:
    """values - decode(payload), block by block: what an encoding has left out."""
    error = torch.empty_like(values)
    for start, stop in _blocks(values.numel()):
        torch.sub(values[start:stop], _decode(codec, payload, start, stop), out=error[start:stop])
    return error


def check_values(codec: Codec, payload: memoryview, elements: int, limit: float) -> None:
    """Raises WireError unless all encoded values are finite, of sane size and within the limit."""
    for start, stop in _blocks(elements):
        block = _decode(codec, payload, start, stop)
        if not is_finite(block) or (block.numel() and float(block.abs().max()) > limit):
            raise WireError(_NOT_FINITE)


def average(codec: Codec, payloads: Sequence[memoryview], elements: int) -> Tensor:
    """The mean of encoded values, in the order given, block by block."""
    mean = torch.empty(elements)
    for start, stop in _blocks(elements):
        mean[start:stop] = mean_in_order(
            _decode(codec, payload, start, stop) for payload in payloads
        )
    return mean


def decode(codec: Codec, payload: memoryview, elements: int) -> Tensor:
    """Fresh fp32 values, 1-D, block by block. Raises WireError unless finite and of sane size."""
    values = torch.empty(elements)
    for start, stop in _blocks(elements):
        block = _decode(codec, payload, start, stop)
        if not is_finite(block):
            raise WireError(_NOT_FINITE)
        values[start:stop] = block
    return values


def state_parts(anchor: Tensor, momentum: Tensor) -> list[memoryview]:
    """The bytes of a fragment's state, as Fetch carries them."""
    return [tensor_bytes(anchor), tensor_bytes(momentum)]


def split_state(payload: memoryview, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(anchor, momentum) of those bytes, without a copy; `sizes` are their numbers of values."""
    anchor, momentum = torch.split(bytes_tensor(payload).view(torch.float32), list(sizes))
    return anchor, momentum


def _blocks(elements: int) -> Iterator[tuple[int, int]]:
    for start in range(0, elements, BLOCK_ELEMENTS):
        yield start, min(elements, start + BLOCK_ELEMENTS)


def _decode(codec: Codec, payload: memoryview, start: int, stop: int) -> Tensor:
    raw = payload[codec.encoded_bytes(start) : codec.encoded_bytes(stop)]
    return codec.decode(bytes_tensor(raw), stop - start)


# ------------------------------------------------------------------------------------- frames


def frame_messages(
    kind: type[pb.ExchangeUp] | type[pb.ExchangeDown] | type[pb.FetchReply],
    parts: Iterable[memoryview],
    offset: int = 0,
) -> Iterator[tuple[bytes, int]]:
    """Cuts the parts, one after another, into frames of at most 1 MiB, from `offset` on.

    Yields each as a serialised message of the kind, and the size of its payload.
    """
    base = 0
    for part in parts:
        for start in range(max(0, offset - base), len(part), MAX_FRAME_BYTES):
            piece = part[start : start + MAX_FRAME_BYTES]
            yield _frame(kind, base + start, piece), len(piece)
        base += len(part)


def payload_messages(
    kind: type[pb.ExchangeUp] | type[pb.ExchangeDown], payload: Payload, offset: int = 0
) -> Iterator[tuple[bytes, int, int]]:
    """The frames of a payload from `offset` on; compressed ones begin at multiples of their size.

    Yields each as a serialised message, the size of what it carries, and how much of the raw
    payload that stands for.
    """
    if not payload.packed or offset % MAX_FRAME_BYTES:
        for message, size in frame_messages(kind, [payload.raw], offset):
            yield message, size, size
        return
    for start in range(offset, len(payload.raw), MAX_FRAME_BYTES):
        raw = payload.raw[start : start + MAX_FRAME_BYTES]
        piece = payload.packed[start // MAX_FRAME_BYTES]
        if piece is None:
            yield _frame(kind, start, raw), len(raw), len(raw)
        else:
            message = _frame(kind, start, memoryview(piece), len(raw), payload.unit_bytes)
            yield message, len(piece), len(raw)


def _frame(
    kind: type[pb.ExchangeUp] | type[pb.ExchangeDown] | type[pb.FetchReply],
    offset: int,
    piece: memoryview,
    raw_bytes: int = 0,
    columns: int = 1,
) -> bytes:
    """One frame as a serialised message of the kind. Written out by hand, field by field, because
    that copies the payload once where the generated code does thrice; 0 is left out."""
    outer = kind.DESCRIPTOR.fields_by_name["frame"].number
    at = b"\x08" + _varint(offset) if offset else b""
    head = at + b"\x12" + _varint(len(piece))
    tail = b"\x19" + hash64(piece).to_bytes(8, "little")
    tail += b"\x20" + _varint(raw_bytes) if raw_bytes else b""
    tail += b"\x28" + _varint(columns) if columns > 1 else b""
    size = _varint(len(head) + len(piece) + len(tail))
    return b"".join((bytes((outer << 3 | 2,)), size, head, piece, tail))


def _varint(value: int) -> bytes:
    """Protobuf's encoding of an unsigned number."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class Incoming:
    """A payload of known size and hash, arriving in frames; resumes where it broke off.

    `taken_by` is the stream it arrives on: an earlier one that still trickles is passed over.
    """

    def __init__(self, total_bytes: int, whole_hash: int) -> None:
        self.total_bytes, self.hash = total_bytes, whole_hash
        self.buffer = memoryview(bytearray(total_bytes))
        self.received_bytes = 0
        self.verified = False
        self.taken_by: object = None

    @classmethod
    def held(cls, payload: memoryview, whole_hash: int) -> "Incoming":
        """A payload that is here already: this peer's own."""
        incoming = cls(0, whole_hash)
        incoming.buffer = payload
        incoming.total_bytes = incoming.received_bytes = len(payload)
        incoming.verified = True
        return incoming

    @property
    def complete(self) -> bool:
        return self.received_bytes == self.total_bytes

    def add(self, frame: pb.Frame) -> tuple[int, int]:
        """Takes a frame; returns the size of what it carried, and of what that stands for.

        Raises:
            Again: the frame is out of place, too large, or its bytes have changed.
        """
        carried = frame.payload  # once: each access makes a copy
        size = frame.raw_bytes or len(carried)
        if frame.offset != self.received_bytes:
            raise Again(f"a frame at {frame.offset}, expected {self.received_bytes}")
        if (
            size == 0
            or max(size, len(carried)) > MAX_FRAME_BYTES
            or frame.offset + size > self.total_bytes
        ):
            raise Again(f"a frame of {size} bytes at {frame.offset} of {self.total_bytes}")
        if hash64(carried) != frame.hash:
            raise Again(f"the frame at {frame.offset} is damaged: its hash differs")
        payload = _unpack(carried, size, frame.columns) if frame.raw_bytes else carried
        self.buffer[frame.offset : frame.offset + size] = payload
        self.received_bytes += size
        return len(carried), size

    def verify(self) -> None:
        """Raises Again unless everything is here and has the announced hash."""
        if not self.complete:
            raise Again(f"{self.received_bytes} of {self.total_bytes} bytes arrived")
        if hash64(self.buffer) != self.hash:
            raise Again("the payload is damaged: its hash differs")
        self.verified = True


def _unpack(packed: bytes, size: int, columns: int) -> memoryview:
    """`size` bytes of zstd; its header is checked before anything is done. Raises Again."""
    try:
        header = zstandard.get_frame_parameters(packed)
        if header.content_size != size or header.window_size > _MAX_WINDOW_BYTES:
            raise Again(f"a zstd frame of {header.content_size} bytes, announced as {size}")
        plain = _zstd.decompressor.decompress(packed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Again(f"a damaged zstd frame: {error}") from error
    if columns > _MOST_COLUMNS:
        raise Again(f"a frame of {columns} columns; at most {_MOST_COLUMNS}")
    return _units(plain, columns)


def _pack(compressor: zstandard.ZstdCompressor, units: memoryview, unit_bytes: int) -> bytes:
    """zstd of the columns of units: first the first byte of every one, then the second, ...

    Each column begins a block of its own, so that its bytes are coded by their own frequencies.
    """
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


def _units(columns: bytes, unit_bytes: int) -> memoryview:
    """The units of such columns."""
    whole = len(columns) // unit_bytes * unit_bytes if unit_bytes > 1 else 0
    if whole == 0:
        return memoryview(columns)
    flat = np.frombuffer(columns, np.uint8)
    units = flat[:whole].reshape(unit_bytes, -1).T.ravel()
    return memoryview(np.concatenate((units, flat[whole:])))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------- messages


def parse(kind: type[T], raw: bytes) -> T:
    """Raises Again when the bytes are no such message."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise Again(f"not a {kind.__name__}") from error


def card_to_message(card: Card) -> pb.PeerCard:
    return pb.PeerCard(
        peer=card.peer,
        address=card.address,
        epoch=card.epoch,
        incarnation=card.incarnation,
        health=pb.Health.ValueType(card.health),
        phase=pb.Phase.ValueType(card.phase),
        heartbeat=card.heartbeat,
        step=card.step,
        digests=[
            pb.FragmentDigest(version=d.version, contributors=d.contributors, hash=d.hash)
            for d in card.digests
        ],
    )


def card_from_message(message: pb.PeerCard) -> Card:
    """Raises WireError when names or enums are out of range."""
    for name in (message.peer, message.address):
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise WireError(f"a peer with a name or address of {len(name)} characters")
        if not name.isprintable():
            raise WireError(f"a peer with the name or address {name!r}")
    try:
        health, phase = Health(message.health), Phase(message.phase)
    except ValueError as error:
        raise WireError(f"peer {message.peer}: {error}") from error
    return Card(
        peer=message.peer,
        address=message.address,
        epoch=message.epoch,
        incarnation=message.incarnation,
        health=health,
        phase=phase,
        heartbeat=message.heartbeat,
        step=message.step,
        digests=tuple(Digest(d.version, d.contributors, d.hash) for d in message.digests),
    )


def cards_from_messages(messages: Sequence[pb.PeerCard]) -> tuple[Card, ...]:
    if len(messages) > _MAX_PEERS:
        raise WireError(f"{len(messages)} peers in one message; at most {_MAX_PEERS}")
    return tuple(card_from_message(message) for message in messages)


def pack_document(document: object) -> bytes:
    """A document of plain values as compressed msgpack."""
    return zstandard.ZstdCompressor(level=3).compress(msgpack.packb(document))


def unpack_document(raw: bytes) -> object:
    """Raises WireError when damaged, nested deeply, or larger than a manifest can be.

    The output is read through a bounded reader: the size in the zstd header is not trusted.
    """
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(raw)
        plain = reader.read(MAX_DOCUMENT_BYTES + 1)
        if len(plain) > MAX_DOCUMENT_BYTES:
            raise WireError(f"a document of more than {MAX_DOCUMENT_BYTES} bytes")
        document = msgpack.unpackb(
            plain,
            strict_map_key=True,
            max_array_len=_MAX_DOCUMENT_ITEMS,
            max_map_len=_MAX_DOCUMENT_ITEMS,
        )
    except (zstandard.ZstdError, ValueError, msgpack.UnpackException) as error:
        raise WireError(f"a damaged document: {error}") from error
    _check_document(document, _MAX_DOCUMENT_DEPTH)
    return document


def _check_document(value: object, depth: int) -> None:
    """Raises WireError unless the keys are text and the nesting is shallow."""
    if depth == 0:
        raise WireError(f"a document nested deeper than {_MAX_DOCUMENT_DEPTH}")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise WireError(f"a document with the key {key!r}")
            _check_document(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_document(inner, depth - 1)


# ----------------------------------------------------------------------------------- exchange


@dataclass(frozen=True)
class Reduction:
    """The mean of a shard, as the encoded bytes that everyone applies."""

    contributors: tuple[str, ...]
    next_group: tuple[str, ...]
    payload: Payload
    last: str  # whose contribution came last


def status_reply(document: object) -> bytes:
    """The answer of `Control/Status`."""
    return pb.StatusReply(document=pack_document(document)).SerializeToString()


def key_of(header: pb.ContributionHeader) -> ShardKey:
    return ShardKey(header.fragment, header.round, header.shard)


def reduction_header(reduction: Reduction, codec: int) -> bytes:
    return pb.ExchangeDown(
        header=pb.ReductionHeader(
            contributors=reduction.contributors,
            next_group=reduction.next_group,
            codec=codec,
            total_bytes=len(reduction.payload.raw),
            hash=reduction.payload.hash,
            last=reduction.last,
        )
    ).SerializeToString()


REFUSAL_CODES: dict[str, "pb.RefusalCode.ValueType"] = {
    "group": pb.RefusalCode.REFUSAL_GROUP,
    "pruned": pb.RefusalCode.REFUSAL_PRUNED,
    "invalid": pb.RefusalCode.REFUSAL_INVALID,
    "again": pb.RefusalCode.REFUSAL_AGAIN,
}


def refusal(code: "pb.RefusalCode.ValueType", reason: str) -> bytes:
    return pb.ExchangeDown(refusal=pb.Refusal(code=code, reason=reason)).SerializeToString()
