"""`murmur`, watched by a test: it writes down its rounds in pairs, and may stop amid one.

    python -m tests.support.watched ACCOUNT HOLD murmur's arguments...

ACCOUNT is a folder: for every contribution and every round that is applied it takes a file of
tensors, in their order. HOLD is empty, or JSON: at that point of that round the worker's network
stands still until the test goes on, so that a fault comes exactly there and needs no sleeping.
"""

import itertools
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from murmuration.algorithms.fragment_state import Contribution, FragmentOptimizer, RoundResult
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import daemon
from murmuration.worker.cli import main
from murmuration.worker.exchange.pairwise.buffer import CONTRIBUTION
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.transport import Caller, Stream
from murmuration.worker.transport.grpc import GrpcTransport
from murmuration.worker.transport.interface import Handler


@dataclass
class Hold:
    """Where a worker stands still, once.

    Args:
        told: a FIFO that takes the partner's name then.
        gate: a FIFO; the worker goes on when that has a writer.
        round: of fragment 0.
        point: "contribution": that is announced, and none of it is sent; "staged": everything has
            been sent but that everything is here.
    """

    told: str
    gate: str
    round: int
    point: str
    over: bool = field(default=False, init=False)

    def stand(self, partner: str) -> None:
        self.over = True
        with open(self.told, "w") as told:
            told.write(f"{partner}\n")
        os.close(os.open(self.gate, os.O_RDONLY))


class Account:
    """Of what a worker contributes and applies; train thread only."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self._numbers = folder, itertools.count()

    def watch(self) -> None:
        """From now on in this process."""
        contribute, apply = FragmentOptimizer.contribute, FragmentOptimizer.apply

        def contributes(fragment: FragmentReplica, g: Tensor, step: int) -> Contribution:
            sent = contribute(fragment, g, step)
            self._write("sent", fragment, sent.round, 1, sent.values, fragment.state.anchor)
            return sent

        def applies(fragment: FragmentReplica, result: RoundResult, local: Tensor) -> Tensor:
            assert result.mean_anchor is not None
            count = result.contributors
            self._write("applied", fragment, result.round, count, result.mean, result.mean_anchor)
            return apply(fragment, result, local)

        FragmentReplica.contribute, FragmentReplica.apply = contributes, applies

    def _write(
        self,
        kind: str,
        replica: FragmentReplica,
        round_: int,
        count: int,
        values: Tensor,
        anchor: Tensor,
    ) -> None:
        name = f"{next(self._numbers):06d}-{kind}-{replica.fragment.index}-{round_}-{count}"
        save_file({"values": values, "anchor": anchor}, self._folder / name)


class HeldStream:
    """A stream of a round in pairs on which the worker may stop. io thread only."""

    def __init__(self, stream: Stream, hold: Hold) -> None:
        self._stream, self._hold = stream, hold
        self._partner, self._due, self._part = "", False, None

    async def send(self, message: bytes) -> None:
        said = pb.PairMessage.FromString(message)
        kind = said.WhichOneof("body")
        if kind == "header":
            self._due = (said.header.fragment, said.header.round) == (0, self._hold.round)
        elif kind == "part":
            self._part = said.part.part
        point = "contribution" if kind == "frame" and self._part == CONTRIBUTION else kind
        if self._due and point == self._hold.point and not self._hold.over:
            self._hold.stand(self._partner)
        await self._stream.send(message)

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if message is not None:
            said = pb.PairMessage.FromString(message)
            if said.WhichOneof("body") == "header":
                self._partner = said.header.sender
        return message

    async def done(self) -> None:
        await self._stream.done()

    def cancel(self) -> None:
        self._stream.cancel()


@dataclass(frozen=True)
class _HeldHandler:
    handler: Handler
    hold: Hold

    def admit(self, method: str, caller: Caller) -> None:
        self.handler.admit(method, caller)

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return await self.handler.on_call(method, request, caller)

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        meets = method == "Data/PairRound"
        stream = HeldStream(stream, self.hold) if meets else stream
        await self.handler.on_stream(method, stream, caller)


def held_transport(hold: Hold) -> type[GrpcTransport]:
    """A transport whose rounds in pairs the worker may stop in."""

    class HeldTransport(GrpcTransport):
        async def listen(self, handler: Handler) -> str:
            return await super().listen(_HeldHandler(handler, hold))

        def open(self, address: str, method: str, peer: str | None = None) -> Stream:
            stream = super().open(address, method, peer)
            return HeldStream(stream, hold) if method == "Data/PairRound" else stream

    return HeldTransport


def program(account: Path, hold: Hold | None = None) -> tuple[str, ...]:
    """What follows `python -m` and comes before murmur's arguments."""
    described = {} if hold is None else asdict(hold)
    described.pop("over", None)
    return ("tests.support.watched", str(account), json.dumps(described) if described else "")


if __name__ == "__main__":
    _, folder, held, *sys.argv[1:] = sys.argv
    Account(Path(folder)).watch()
    if held:
        daemon.GrpcTransport = held_transport(Hold(**json.loads(held)))
    main()
