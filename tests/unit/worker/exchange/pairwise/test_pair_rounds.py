"""The streams of one peer in pairs: what it says to what, and when. The test is its partners."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.pairwise.pair_rounds import Pairs
from murmuration.worker.exchange.pairwise.partner import PairValues
from murmuration.worker.exchange.pairwise.round import ANCHOR, CONTRIBUTION
from murmuration.worker.exchange.round_context import Context, RoundConfig
from murmuration.worker.simulation.virtual_loop import VirtualLoop as Clock
from murmuration.worker.training.mailbox import Begin, PrefetchedAnchor, RoundDone, RoundFailed
from murmuration.worker.wire.tensors import tensor_bytes
from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce.layouts import FakeStream, context_of

T = TypeVar("T")

FP32 = codec_by_name("fp32")
VALUES = 4
SIZE = 4 * VALUES


def values(peer: str, part: int) -> torch.Tensor:
    return torch.full((VALUES,), float(10 * (ord(peer) - 96) + part))


def raw(peer: str, part: int) -> memoryview:
    return tensor_bytes(values(peer, part))


async def at_once(work: Callable[[], T], /) -> T:
    return work()


class Line(FakeStream):
    def __init__(self, peer: str, clock: Clock) -> None:
        super().__init__()
        self.peer, self._clock = peer, clock
        self.task: asyncio.Task[None] | None = None  # that serves it

    @property
    def messages(self) -> list[pb.PairMessage]:
        return [pb.PairMessage.FromString(raw) for raw in self.sent]

    @property
    def said(self) -> list[object]:
        """By kind: of parts their index, of refusals the code; frames are left out."""
        kinds = ((each, each.WhichOneof("body")) for each in self.messages)
        found = {"part": lambda m: m.part.part, "refusal": lambda m: m.refusal.code}
        said = [found[kind](each) if kind in found else kind for each, kind in kinds]
        return [each for each in said if each not in (None, "frame")]

    @property
    def is_over(self) -> bool:
        return self.task.done() if self.task is not None else self.cancelled

    def hears(self, **body: Any) -> None:
        self.gives(pb.PairMessage(**body).SerializeToString())
        self._clock.settle()

    def announces(self, part: int, **changes: int) -> None:
        fields = {"part": part, "codec": FP32.wire_id, "total_bytes": SIZE, "weight": 1}
        fields |= {"hash": wire.hash64(raw(self.peer, part)), **changes}
        self.hears(part=pb.PartHeader(**fields))

    def gives_part(self, part: int) -> None:
        self.announces(part)
        piece = bytes(raw(self.peer, part))
        self.hears(frame=pb.Frame(payload=piece, hash=wire.hash64(piece)))


class Pair:
    """Peer `me` of the pair ab, or of the only group of `peers`, at version 0."""

    def __init__(
        self, clock: Clock, me: str = "b", peers: str = "ab", *, fragments: int = 1
    ) -> None:
        self.clock, self.me, self.peers = clock, me, peers
        self.results = list[RoundDone | RoundFailed]()
        self.told = list[PrefetchedAnchor]()
        self.suspected, self.opened = list[str](), list[Line]()
        plan = replace(PRESETS["noloco"], inner_steps=1, group_size=len(peers))
        given = {"run": 77, "elements": [VALUES] * fragments, "plan": plan, "config": RoundConfig()}
        self.context = context_of(Context, lambda: clock.now, me=me, offload=at_once, **given)
        schedule = replace(plan.schedule(fragments=1, steps=9), fragments=fragments, together=True)
        self.pairs = Pairs(self.context, schedule, self, self, self.told.append)
        self.pairs.on_view(view(peers))

    def open(self, peer: str, method: str) -> Line:
        self.opened.append(Line(peer, self.clock))
        return self.opened[-1]

    def suspect(self, peer: str) -> None:
        self.suspected.append(peer)

    def finished(self, result: RoundDone | RoundFailed) -> None:
        self.results.append(result)

    @property
    def reasons(self) -> list[str]:
        return [each.reason for each in self.results if isinstance(each, RoundFailed)]

    def run(self, *work: Coroutine[None, None, None]) -> None:
        async def in_turn() -> None:
            for each in work:
                await each

        asyncio.get_running_loop().create_task(in_turn())
        self.clock.settle()

    def advanced(
        self, fragment: int = 0, version: int = 0, anchor: torch.Tensor | None = None
    ) -> Coroutine[None, None, None]:
        anchor = values(self.me, ANCHOR) if anchor is None else anchor
        state = FragmentState(version, 0, (), anchor, torch.zeros(VALUES), 0)
        return self.pairs.advanced(fragment, state)

    def lay(self) -> "Pair":
        self.run(self.advanced())
        return self

    def begin(self) -> None:
        anchor, mine = (values(self.me, part) for part in (ANCHOR, CONTRIBUTION))
        self.run(self.pairs.begin(Begin(0, 0, (), mine, anchor)))

    def header(self, sender: str, **changes: Any) -> pb.PairHeader:
        group = wire.group_hash(tuple(self.peers))
        fields = {"run": 77, "fragment": 0, "round": 0, "group": group, "sender": sender}
        return pb.PairHeader(**{**fields, **changes})

    def accepts(self, peer: str = "a") -> Line:
        """A stream that has not said yet what it is for."""
        line = Line(peer, self.clock)
        line.task = asyncio.get_running_loop().create_task(self.pairs.serve(line))
        self.clock.settle()
        return line

    def calls(self, sender: str = "a", **changes: Any) -> Line:
        line = self.accepts(sender)
        line.hears(header=self.header(sender, **changes))
        return line

    def answers(self, line: Line) -> Line:
        line.hears(header=self.header(line.peer))
        return line


def test_an_anchor_goes_ahead_only_while_no_round_is_on_its_way(clock):
    pair = Pair(clock, fragments=2)
    pair.run(pair.advanced(0), pair.advanced(1))
    pair.begin()
    line = pair.calls(fragment=1)
    assert line.said == ["header"]
    pair.pairs.give_up(0, "enough")
    clock.settle()
    assert line.said == ["header", ANCHOR]


def test_without_an_anchor_nobody_waits(clock):
    pair = Pair(clock)
    pair.context.__dict__["plan"] = replace(pair.context.plan, anchor_codec="bf16")
    pair.run(pair.advanced(anchor=torch.full((VALUES,), float("nan"))))
    assert pair.told == [PrefetchedAnchor(0, 0, None)]


def test_a_large_part_is_hashed_off_the_loop(clock):
    offloaded, pair = list[Callable[[], Any]](), Pair(clock)

    async def later(work: Callable[[], Any], /) -> Any:
        offloaded.append(work)

    context = replace(pair.context, elements=[1 << 20], offload=later)
    laid, large = pair.lay().pairs._laid[0, 0], wire.Incoming(4 << 20, 0)
    pair.run(PairValues(context).size(laid, CONTRIBUTION, large))
    with pytest.raises(wire.Again, match="0 of 4194304 bytes"):
        offloaded[0]()


def test_a_stream_that_does_not_say_what_it_is_for_is_ended(clock):
    line = Pair(clock).accepts()
    clock.run(lambda: False, 9.9)
    assert not line.is_over
    clock.run(lambda: False, 10.1)
    assert line.is_over
    assert line.said == []


def test_a_later_stream_of_a_partner_takes_the_place_of_the_earlier(clock):
    pair = Pair(clock).lay()
    first, second = pair.calls(), pair.calls()
    assert first.is_over
    assert second.said == ["header", ANCHOR]
    assert pair.suspected == []


CODES = pb.RefusalCode
AGAIN, INVALID = CODES.REFUSAL_AGAIN, CODES.REFUSAL_INVALID


def refusal(line: Line) -> pb.Refusal:
    assert line.is_over
    return line.messages[-1].refusal


@pytest.mark.parametrize(
    ("changes", "code", "reason", "counted"),
    [
        ({"run": 5}, CODES.REFUSAL_RUN, "another run", "declined"),
        ({"group": 1}, CODES.REFUSAL_GROUP, "another partner", "declined"),
        ({"sender": "c"}, CODES.REFUSAL_GROUP, "another partner", "declined"),  # is called
        ({"sender": "b"}, CODES.REFUSAL_GROUP, "another partner", "declined"),  # itself
        ({"round": 0}, CODES.REFUSAL_PRUNED, "round 0 is over", "declined"),
        ({"fragment": 1}, INVALID, "fragment 1 of 1", "invalid"),
        ({"sender": "x"}, AGAIN, "x is not a member", "again"),
        ({"sender": "x", "round": 9}, AGAIN, "x is not a member", "again"),
        ({"sender": ""}, AGAIN, "nobody is not a member", "again"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(clock, changes, code, reason, counted):
    pair = Pair(clock, peers="abc")
    pair.run(pair.advanced(version=1))
    found = refusal(pair.calls(**{"sender": "a", "round": 1, **changes}))
    assert found.code == code
    assert reason in found.reason
    assert pair.context.counts.refused == {counted: 1}


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (b"\xff\xff\xff", AGAIN, "not a PairMessage"),
        (b"", INVALID, "begin with its header"),
        (pb.PairMessage(prepared=pb.Prepared()).SerializeToString(), INVALID, "with its header"),
    ],
)
def test_what_is_no_header_is_refused(clock, message, code, reason):
    line = Pair(clock).lay().accepts()
    line.gives(message)
    clock.settle()
    assert refusal(line).code == code
    assert reason in refusal(line).reason


def of_number(number: float) -> bytes:
    return tensor_bytes(torch.full((VALUES,), number)).tobytes()


@pytest.mark.parametrize("me", "ab")
@pytest.mark.parametrize(
    ("changes", "payload", "reason"),
    [
        ({"total_bytes": 20}, b"", "20 bytes"),
        ({"total_bytes": 2**40}, b"", f"{2**40} bytes"),
        ({"codec": 2}, b"", "of codec 2"),
        ({"part": 2}, b"", "part 2"),
        ({}, of_number(float("nan")), "NaN"),
        ({}, of_number(1e38), "large"),
    ],
)
def test_a_contribution_that_does_not_fit_ends_the_round_at_once(
    clock, me, changes, payload, reason
):
    """Not at a deadline: it would be the same the next time."""
    pair = Pair(clock, me).lay()
    line = pair.calls() if me == "b" else pair.answers(pair.opened[0])
    pair.begin()
    line.gives_part(ANCHOR)
    line.announces(**{"part": CONTRIBUTION, **(changes or {"hash": wire.hash64(payload)})})
    if payload:
        line.hears(frame=pb.Frame(payload=payload, hash=wire.hash64(payload)))
    assert reason in line.messages[-1].refusal.reason
    assert pair.context.counts.refused == {"invalid": 1}
    assert len(pair.reasons) == 1


def test_a_part_that_goes_on_elsewhere_is_wanted_again(clock):
    line = Pair(clock).lay().calls()
    line.announces(ANCHOR, offset=12)
    assert line.said[2:] == [CODES.REFUSAL_AGAIN]
    assert line.is_over
