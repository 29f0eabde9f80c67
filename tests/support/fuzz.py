"""Spoils what peers parse: garbage, valid messages with bytes or fields changed, zip bombs.

Live nodes on the virtual clock get it, as requests and streams of a stranger and as answers to
their own. Nothing may come of it but refusals: `defects` are exceptions of any other kind.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import zstandard
from google.protobuf.message import DecodeError, Message

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.transport import RELAY_METHODS, Caller, Refused, TransportError
from tests.protocol.problem import Problem
from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, Scripted

REQUESTS: dict[str, type[Message]] = {
    "Control/Enrol": pb.EnrolRequest,
    "Control/Finished": pb.FinishedRequest,
    "Control/Gossip": pb.GossipMessage,
    "Control/IndirectProbe": pb.ProbeRequest,
    "Control/Join": pb.JoinRequest,
    "Control/Lease": pb.LeaseNews,
    "Control/Measure": pb.MeasureRequest,
    "Control/Result": pb.ResultRequest,
    "Control/Status": pb.StatusRequest,
    "Data/Average": pb.ExchangeUp,
    "Data/Exchange": pb.ExchangeUp,
    "Data/Fetch": pb.FetchRequest,
    "Data/PairRound": pb.PairMessage,
    "Data/StageCall": pb.StageCallUp,
    "Relay/Accept": pb.RelayMessage,
    "Relay/Dial": pb.RelayMessage,
    "Relay/Reserve": pb.RelayMessage,
}
# Of what no peer of these swarms says: all can be dialled.
_RELAYING = [
    pb.RelayMessage(header=pb.RelayHeader(sender="a", peer="a", dialled=1)),
    pb.RelayMessage(header=pb.RelayHeader(sender="stranger", peer="stranger")),
    pb.RelayMessage(alive=True),
    pb.RelayMessage(payload=b"bytes of a tunnel"),
]
BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))
_NUMBERS = (0, 1, 2, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_TEXTS = ("", "a", "b", "\x00", "\x1b[2J", "x" * 300, "\N{SNOWMAN}" * 90)
_DOUBLES = (0.0, -1.0, 1e300, float("inf"), float("nan"))
_CHANGED_ANSWERS = 0.05
_KEPT = 50  # samples of each kind
_STRANGER = Caller("stranger")


def spoiled(rng: random.Random, samples: list[bytes], kind: type[Message] | None = None) -> bytes:
    """Garbage, or one of the samples changed. Args: kind: of the samples, to change fields."""
    if not samples or rng.random() < 0.1:
        return rng.choice((rng.randbytes(rng.randrange(100)), b"\x0a\xff\xff\xff\x7f", BOMB))
    raw = rng.choice(samples)
    if kind is not None and rng.random() < 0.5:
        with suppress(DecodeError):
            message = kind.FromString(raw)
            for _ in range(rng.randrange(1, 3)):
                _change_field(rng, message)
            return message.SerializeToString()
    for _ in range(rng.randrange(1, 4)):
        raw = _change_bytes(rng, raw, rng.choice(samples))
    return raw


def _change_bytes(rng: random.Random, raw: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    match rng.randrange(6):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + other[rng.randrange(len(other) + 1) :]
        case 2:
            return raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
        case 3:
            return raw[:at] + b"\xff" * 9 + b"\x01" + raw[at:]
        case 4:
            return raw[:at] + BOMB[:64] + raw[at:]
        case _:
            return raw[:at] + bytes((rng.randrange(256),)) + raw[at + 1 :]


def _change_field(rng: random.Random, message: Message) -> None:
    """One of the message's, or of a message in it."""
    fields = [each for each, _ in message.ListFields()]
    if not fields or rng.random() < 0.2:
        fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    one = rng.choice(fields)
    held: Any = getattr(message, one.name)
    if one.message_type is not None:
        if not one.is_repeated:
            _change_field(rng, held)
        elif held and rng.random() < 0.7:
            _change_field(rng, rng.choice(held))
        else:
            for _ in range(rng.choice((1, 300))):
                held.add()
        return
    value = _value(rng, one)
    if one.is_repeated:
        held.extend([value] * rng.choice((1, 2, 5000)))
    else:
        setattr(message, one.name, value)


def _value(rng: random.Random, one: Any) -> object:
    match one.cpp_type:
        case one.CPPTYPE_STRING if one.type == one.TYPE_BYTES:
            return rng.choice((b"", BOMB, rng.randbytes(20)))
        case one.CPPTYPE_STRING:
            return rng.choice(_TEXTS)
        case one.CPPTYPE_DOUBLE | one.CPPTYPE_FLOAT:
            return rng.choice(_DOUBLES)
        case one.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case one.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 5, 99))
        case one.CPPTYPE_UINT32 | one.CPPTYPE_INT32:
            most = 2**32 if one.cpp_type == one.CPPTYPE_UINT32 else 2**31
            return rng.choice([number for number in _NUMBERS if number < most])
        case _:
            return rng.choice(_NUMBERS)


@dataclass
class Fuzz:
    """Spoils messages of a swarm that trains. It listens from the beginning on."""

    swarm: Swarm
    rng: random.Random
    samples: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    executions: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    spoils_answers: bool = False

    def listen(self) -> None:
        """To what the peers that are there say to one another."""
        self.swarm.tap = self._tap
        for method in RELAY_METHODS:
            self.samples[method] += [said.SerializeToString() for said in _RELAYING]
        for peer in self.swarm.alive:
            peer.node.server.on_defect = self._defect  # type: ignore[method-assign]
            peer.node.transport.call = self._called(peer.node.transport.call)  # type: ignore[method-assign]

    async def request(self, name: str) -> None:
        """One call or stream to this peer, of a method that it answers."""
        server, rng = self.swarm[name].node.server, self.rng
        method = rng.choice(sorted({*server.calls, *server.calls_by, *server.streams}))
        kind, samples = REQUESTS[method], self.samples[method]
        self.executions[method] += 1
        with suppress(Refused, TransportError, TimeoutError):
            if method in server.streams:
                begins = rng.choice(samples) if samples and rng.random() < 0.5 else None
                rest = [spoiled(rng, samples, kind) for _ in range(rng.randrange(1, 4))]
                stream = Scripted(*(rest if begins is None else [begins, *rest]), ends=True)
                async with asyncio.timeout(0.05):
                    await server.on_stream(method, stream, _STRANGER)
            else:
                async with asyncio.timeout(0.05):
                    await server.on_call(method, spoiled(rng, samples, kind), _STRANGER)

    def _tap(self, passing: Passing) -> bytes:
        return self._passed(passing.method, passing.message, up=passing.up)

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def changed(address: str, method: str, request: bytes, *rest: Any) -> bytes:
            self._passed(method, request, up=True)
            return self._passed(method, await call(address, method, request, *rest), up=False)

        return changed

    def _passed(self, method: str, message: bytes, *, up: bool) -> bytes:
        kept = self.samples[method if up else f"{method} answer"]
        if len(kept) < _KEPT:
            kept.append(message)
        if up or not self.spoils_answers or self.rng.random() > _CHANGED_ANSWERS:
            return message
        self.executions[f"{method} answer"] += 1
        return spoiled(self.rng, kept)

    def _defect(self, where: str, error: Exception) -> None:
        self.defects.append(f"{where}: {error!r}")


_STEPS = 1_000_000
SWARMS: dict[str, tuple[Callable[[], Swarm], tuple[str, ...]]] = {
    "means": (lambda: Swarm(Problem(steps=_STEPS, plan=Plan(inner_steps=5))), ("a", "b", "c")),
    "pairs": (
        lambda: Swarm(Problem(steps=_STEPS, plan=replace(PRESETS["noloco"], inner_steps=5))),
        ("a", "b", "c"),
    ),
    "stages": (
        lambda: StageSwarm(
            StagedProblem(
                count=2,
                microbatches=2,
                plain=True,
                steps=_STEPS,
                plan=replace(PRESETS["diloco"], inner_steps=5),
                forward_s={"0a": 0.1, "1a": 0.1},
            )
        ),
        ("0a", "1a"),
    ),
}


async def swarm_under_fire(kind: str, rng: random.Random, executions: int) -> Fuzz:
    """Spoils so many requests to a peer of such a swarm, and answers to all of them meanwhile, but
    for those to joining: whom a peer joins may say that it runs something else, and that ends it.
    Afterwards rounds go on."""
    make, names = SWARMS[kind]
    async with make() as swarm:
        await swarm.start(*names)
        fuzz, first = Fuzz(swarm, rng), swarm[names[0]]
        await swarm.until(lambda: first.versions[0] >= 1, 120)
        fuzz.listen()
        await swarm.until(lambda: first.versions[0] >= 3, 240)
        fuzz.spoils_answers = True
        for n in range(executions):
            await fuzz.request(names[0])
            if n % max(10, executions // 30) == 0:
                await swarm.sleep(1.0)
        fuzz.spoils_answers, before = False, first.versions[0]
        await swarm.until(lambda: first.versions[0] >= before + 2, 900)
        fuzz.defects += [repr(p.train.error) for p in swarm.alive if p.train.error is not None]
        return fuzz
