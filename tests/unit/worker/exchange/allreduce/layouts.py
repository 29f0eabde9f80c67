"""A layout of rounds that is easy to read: shard k goes to the k-th peer, then to the others."""

from collections.abc import Sequence

from algorithms.codecs import codec_by_name
from worker.exchange.allreduce.dialogue import Group, ShardRange

ELEMENTS = 10
TRANSFER_S = 3.0
ROUND_S = 60.0


class ByName:
    """Args: orders: of the shards, or else by name; elements: of every shard."""

    run, fragments = 7, 3
    codec = codec_by_name("fp32")
    reduction_codec = codec_by_name("bf16")

    def __init__(self, orders: Sequence[str] = (), elements: int = ELEMENTS) -> None:
        self._orders, self._elements = orders, elements

    def orders(self, fragment: int, group: Group) -> Sequence[Sequence[str]]:
        return self._orders or [
            (first, *(peer for peer in group if peer != first)) for first in group
        ]

    def shards(self, fragment: int, group: Group) -> Sequence[ShardRange]:
        size = self._elements
        return [
            ShardRange(k * size, (k + 1) * size, 4 * size, 2 * size)
            for k in range(len(self.orders(fragment, group)))
        ]

    def group_hash(self, group: Group) -> int:
        return hash(group)

    def weight(self, announced: int) -> int:
        if announced > 20:
            raise ValueError(f"a contribution of {announced} steps")
        return announced

    def transfer_s(self, fragment: int) -> float:
        return TRANSFER_S

    def round_s(self, fragment: int) -> float:
        return ROUND_S
