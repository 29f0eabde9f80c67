"""What a contributor commits itself to: a root over the hashes of the leaves of its shard.

A leaf is a range of values, on whole blocks of the codecs: about a 64th of the shard. Whoever has
the root can tell whether a leaf is the one that was meant, by as few hashes as the tree is deep.
Hashes are BLAKE2b, of 16 bytes; a node without a neighbour is its own parent. The root covers what
the contribution counts, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from murmuration.algorithms.codecs import Codec

HASH_BYTES = 16
_LEAVES = 64
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
        size = min(max(_FEWEST, elements // _LEAVES), _MOST)
        return cls(elements, -(-size // block) * block)

    @property
    def count(self) -> int:
        return -(-self.elements // self.size)

    def bounds(self, leaf: int) -> tuple[int, int]:
        """The values in a leaf, from and to."""
        return leaf * self.size, min(self.elements, (leaf + 1) * self.size)


class Commitment:
    """One peer's contribution to a shard, of which it can show any leaf. any thread.

    Args: payload: the encoded shard; weight: what it counts.
    """

    def __init__(self, codec: Codec, leaves: Leaves, payload: memoryview, weight: int) -> None:
        self._codec, self._leaves, self._payload = codec, leaves, payload
        level = [_hash(b"leaf", self._values(leaf)) for leaf in range(leaves.count)]
        self._levels = [level]
        while len(level) > 1:
            level = [_parent(level[at : at + 2]) for at in range(0, len(level), 2)]
            self._levels.append(level)
        self.root = _root(level[0] if level else b"", weight)

    def shown(self, leaf: int) -> tuple[bytes, list[bytes]]:
        """The encoded values of a leaf, and its neighbours on the way to the root."""
        path, at = [], leaf
        for level in self._levels[:-1]:
            path += level[at ^ 1 : (at ^ 1) + 1]
            at //= 2
        return bytes(self._values(leaf)), path

    def _values(self, leaf: int) -> memoryview:
        start, stop = map(self._codec.encoded_bytes, self._leaves.bounds(leaf))
        return self._payload[start:stop]


def root_of(payload: bytes, leaf: int, path: Sequence[bytes], count: int, weight: int) -> bytes:
    """The root that a shown leaf, one of `count`, leads to; empty if the path does not fit."""
    found, rest = _hash(b"leaf", payload), list(reversed(path))
    while count > 1:
        if leaf ^ 1 < count:
            if not rest:
                return b""
            other = rest.pop()
            found = _parent([other, found] if leaf % 2 else [found, other])
        leaf, count = leaf // 2, (count + 1) // 2
    return _root(found, weight) if not rest else b""


def _parent(children: Sequence[bytes]) -> bytes:
    return _hash(b"node", b"".join(children)) if len(children) > 1 else children[0]


def _root(top: bytes, weight: int) -> bytes:
    return _hash(b"root", top + weight.to_bytes(8, "little"))


def _hash(kind: bytes, of: bytes | memoryview) -> bytes:
    return blake2b(of, digest_size=HASH_BYTES, person=kind).digest()
