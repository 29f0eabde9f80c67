"""One reducer, whose contributors are the test."""

import asyncio
from contextlib import suppress
from typing import Any

import torch

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.view import Group, ShardKey, View
from murmuration.worker.simulation.virtual_loop import VirtualLoop as Clock
from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce.layouts import BYTES, Bench, FakeStream, encoded, frame

GROUP = ("a", "b", "c", "d")
KEY = ShardKey(0, 0, 0)
LEARNED = wire.Reduction(
    wire.ReductionHeader(("a", "d"), GROUP, 1, BYTES // 2, 9, "d"),
    wire.Payload(memoryview(bytes(BYTES // 2)), 9),
)


class Contribution(FakeStream):
    def __init__(self, bench: "Reducing", opening: bytes, raw: memoryview) -> None:
        super().__init__()
        self._bench, self._raw, self._sent = bench, raw, 0
        self.gives(opening)
        self.task = asyncio.ensure_future(self._served(bench.reducer))
        bench.settle()

    async def _served(self, reducer: Reducer) -> None:
        with suppress(asyncio.CancelledError):
            await reducer.serve(self)

    def send_up_to(self, end: int, start: int | None = None) -> "Contribution":
        """The bytes up to there, from where they are, or from `start`."""
        start = self._sent if start is None else start
        self.gives(frame(pb.ExchangeUp, self._raw[start:end], start))
        self._sent = end
        self._bench.settle()
        return self

    def ends(self) -> None:
        self.gives(None)
        self._bench.settle()

    def breaks(self) -> None:
        self.task.cancel()
        self._bench.settle()

    @property
    def told(self) -> list[str]:
        """The answers, in a word each; of an answer, its offset."""
        said, answer = list[str](), None
        for raw in self.sent:
            down = pb.ExchangeDown.FromString(raw)
            match down.WhichOneof("body"):
                case "resume":
                    said.append(f"resume {down.resume.offset}")
                case "redirect":
                    said.append(f"to {down.redirect.peer}")
                case "refusal":
                    assert down.refusal.reason
                    said.append(wire.refusal_kind(down.refusal))
                case "header":
                    answer = "".join(down.header.contributors)
                    said.append(f"mean of {answer}")
                case "frame":
                    said.append(f"from {down.frame.offset}") if down.frame.offset else None
        return said

    @property
    def mean(self) -> set[float]:
        frames = (pb.ExchangeDown.FromString(raw).frame.payload for raw in self.sent)
        return {*torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.bfloat16).tolist()}

    @property
    def answer(self) -> pb.ReductionHeader:
        came = map(pb.ExchangeDown.FromString, self.sent)
        return next(down.header for down in came if down.HasField("header"))


class Reducing(Bench):
    def __init__(
        self, clock: Clock, me: str = "a", seen: View | None = None, version: int | None = 0
    ) -> None:
        super().__init__(me, clock)
        self.reducer = Reducer(self.context)
        self.on_view(view("abcd") if seen is None else seen)
        if version is not None:
            self.advanced(version)

    def on_view(self, seen: View) -> None:
        self.reducer.on_view(seen)
        self.settle()

    def advanced(self, version: int, group: Group = GROUP, fragment: int = 0) -> None:
        self.reducer.advanced(fragment, version, group)
        self.settle()

    def tick(self, now: float) -> None:
        self.now = now
        self.reducer.tick()
        self.settle()

    def learned(self, key: ShardKey = KEY) -> None:
        self.reducer.learned(key, LEARNED)
        self.settle()

    def offer(
        self,
        peer: str = "d",
        key: ShardKey = KEY,
        group: Group = GROUP,
        value: float | None = None,
        **changes: Any,
    ) -> Contribution:
        raw = encoded(ord(peer) if value is None else value)
        return Contribution(self, self.header(raw, peer, key, group, **changes), raw)

    def header(
        self,
        raw: memoryview,
        peer: str = "d",
        key: ShardKey = KEY,
        group: Group = GROUP,
        **changes: Any,
    ) -> bytes:
        codecs = self.context.codec, self.context.reduction_codec
        leaves, norms = wire.Leaves.of(10, codecs), [changes.get("norm", 1000.0) / 2] * 4
        try:
            root = wire.Commitment(codecs[0], leaves, raw, changes.get("weight", 1), norms).root
        except wire.WireError:  # what is not finite has no squares
            root = wire.Commitment(codecs[0], leaves, raw, 1).root
        plain = {"fragment": key.fragment, "round": key.round, "shard": key.shard, "sender": peer}
        plain |= {"group": wire.group_hash(group), "codec": self.context.codec.wire_id}
        plain |= {"run": self.context.run, "weight": 1, "norm": 1000.0, "elements": 10}
        plain |= {"total_bytes": BYTES, "hash": wire.hash64(raw), "root": root}
        plain |= {"norms": norms}
        header = pb.ContributionHeader(**(plain | changes))
        return pb.ExchangeUp(header=header).SerializeToString()

    def contribute(self, peers: str, group: Group = GROUP) -> list[Contribution]:
        return [self.offer(peer, group=group).send_up_to(BYTES) for peer in peers]

    def answer(self, key: ShardKey = KEY, group: Group = GROUP) -> str:
        """The answer to a peer that offers a contribution, at once."""
        stream = self.offer("d", key, group)
        reads, told = stream.is_read, " ".join(stream.told)
        stream.breaks()
        return told or ("take" if reads else "hold")

    @property
    def awaited(self) -> str:
        return "".join(sorted(self.reducer.shards.awaited(KEY)))


def told(streams: list[Contribution]) -> set[str]:
    return {" ".join(stream.told) for stream in streams}
