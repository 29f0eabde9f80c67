"""What a visit is called, and where it goes on."""

from dataclasses import dataclass

import xxhash

from worker.membership import Member


@dataclass(frozen=True, order=True)
class Incarnation:
    """A peer from the start of its process on; `epoch` is its card's. Who starts again under the
    same name has nothing of what its earlier life had under way."""

    peer: str
    epoch: int

    @classmethod
    def of(cls, member: Member) -> "Incarnation":
        return cls(member.peer, member.epoch)


@dataclass(frozen=True, order=True)
class Key:
    """One microbatch on one stage; a repeated call has the same."""

    iteration: int
    origin: Incarnation
    microbatch: int

    @property
    def number(self) -> int:
        """Of the microbatch among all origins', by which its gradient is counted once."""
        return xxhash.xxh3_64_intdigest(
            f"{self.microbatch}/{self.origin.epoch}/{self.origin.peer}".encode()
        )


@dataclass(frozen=True)
class Hop:
    """A stage, and the peer that is to serve it."""

    stage: int
    peer: str


@dataclass(frozen=True)
class StageCall:
    """A microbatch on its way: where it is, and where it goes on. `shape` is (B, T, D)."""

    key: Key
    stage: int
    rest: tuple[Hop, ...]
    shape: tuple[int, ...]
    schedule: int
    sender: str


@dataclass(frozen=True)
class Back:
    """The gradient of what a visit was given, encoded; and who has taken part, in order."""

    gradient: memoryview
    path: tuple[str, ...]
