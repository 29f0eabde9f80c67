"""What both sides of an exchange share."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from algorithms.codecs import Codec
from algorithms.fragments import shard_bounds
from worker.rounds import RoundConfig, ShardKey

T = TypeVar("T")


class Offload(Protocol):
    """Runs a function of numpy and torch calls off the loop."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


@dataclass
class Counts:
    """Payload (encoded values, without headers) that crossed the network, in bytes; and events."""

    payload_sent_bytes: int = 0
    payload_received_bytes: int = 0
    late: int = 0
    takeovers: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


@dataclass(frozen=True, kw_only=True)
class Context:
    """Args:
    me, run: this peer and the run's id.
    elements: number of values of each fragment.
    codec, reduction_codec: of contributions and of what comes back.
    config: closing rules; detection_s: how long a dead peer takes to be noticed.
    clock: monotonic seconds.
    offload: where heavy work runs.
    log: takes events as plain values.
    """

    me: str
    run: int
    elements: Sequence[int]
    codec: Codec
    reduction_codec: Codec
    config: RoundConfig
    detection_s: float
    clock: Callable[[], float]
    offload: Offload
    log: Callable[[dict[str, object]], None]
    counts: Counts = field(default_factory=Counts)

    def bounds(self, fragment: int, shards: int) -> tuple[tuple[int, int], ...]:
        """The ranges of a fragment's shards, on blocks of both codecs."""
        align = max(self.codec.block_elements, self.reduction_codec.block_elements)
        return shard_bounds(self.elements[fragment], shards, align)

    def shard(self, key: ShardKey, shards: int) -> tuple[int, int]:
        """The range of one shard."""
        return self.bounds(key.fragment, shards)[key.shard]

    def round_s(self, fragment: int) -> float:
        """How long a round of the fragment may take."""
        payload_bytes = self.codec.encoded_bytes(self.elements[fragment])
        return self.config.round_s(payload_bytes, self.detection_s)


class Tasks:
    """Background tasks whose failures are never silent, and which all end together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a background task failed", "exception": error, "task": task}
            )
