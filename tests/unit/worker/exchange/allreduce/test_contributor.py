"""Contributing: where each shard goes, what is said on a stream, and how a round ends."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce import contributor
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.reducer import Answer, Reducer
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import ShardKey, View
from murmuration.worker.simulation.virtual_loop import VirtualLoop as Clock
from murmuration.worker.training.mailbox import Begin, RoundDone, RoundFailed
from murmuration.worker.transport import Unreachable
from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce import layouts
from tests.unit.worker.exchange.allreduce.layouts import ELEMENTS, ROUND_S, FakeStream

T = TypeVar("T", RoundDone, RoundFailed)
ORDERS = ("abc", "bca", "cab")
FROM_AFAR = ("bca",)
GROUP = ("a", "b", "c")
SIZE = layouts.BYTES // 2  # of a reduction
MEAN = memoryview(bytearray(b"\x80\x3f" * ELEMENTS))  # ones, in bf16
RETRY_S = layouts.CONFIG.retry_s
OVERDUE_S = 1.5 * 8.0 + layouts.TRANSFER_S


class Try(FakeStream):
    def __init__(self, peer: str, settle: Callable[[], None]) -> None:
        super().__init__()
        self.peer, self._settle = peer, settle

    @property
    def header(self) -> pb.ContributionHeader:
        return pb.ExchangeUp.FromString(self.sent[0]).header

    @property
    def key(self) -> tuple[int, str, bool]:
        """(shard, peer, resumed)."""
        return self.header.shard, self.peer, self.header.resumed

    @property
    def frames(self) -> list[int]:
        return [pb.ExchangeUp.FromString(raw).frame.offset for raw in self.sent[1:]]

    def says(self, **body: Any) -> None:
        self.gives(pb.ExchangeDown(**body).SerializeToString())
        self._settle()

    def breaks(self, reason: str = "reset") -> None:
        self.gives(Unreachable(reason))
        self._settle()

    def refuses(self, kind: Any, reason: str = "no room") -> None:
        self.says(refusal=wire.refusal(kind, reason))

    def begins(self, contributors: str = "abc", last: str = "c", **changes: Any) -> None:
        root = bytes(wire.HASH_BYTES)
        plain = {"contributors": tuple(contributors), "joiners": (), "last": last, "lefts": (root,)}
        plain |= {"roots": (root,) * len(contributors), "codec": 2, "total_bytes": SIZE}
        plain |= {"hash": wire.hash64(MEAN)}
        self.gives(wire.reduction_to_message(wire.ReductionHeader(**(plain | changes))))
        self._settle()

    def brings(self, start: int = 0, stop: int = SIZE) -> None:
        self.gives(layouts.frame(pb.ExchangeDown, MEAN[start:stop], start))
        self._settle()

    def reduces(self, contributors: str = "abc", last: str = "c") -> None:
        self.begins(contributors, last)
        self.brings()


class OwnReducer(Reducer):
    """The peer's own, for which the test answers the contribution that waits there."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.passed_over: list[tuple[int, str]] = []
        self.tries: list[asyncio.Future[Answer]] = []
        self.shards.overdue_s = lambda *_: OVERDUE_S  # type: ignore[method-assign]

    async def contribute(
        self, header: pb.ContributionHeader, norm: float, payload: wire.Payload
    ) -> Answer:
        self.tries.append(asyncio.get_running_loop().create_future())
        return await self.tries[-1]

    def pass_over(self, key: ShardKey, peer: str) -> None:
        super().pass_over(key, peer)
        self.passed_over.append((key.shard, peer))


class Contributing(layouts.Bench):
    def __init__(self, clock: Clock, orders: tuple[str, ...] = ORDERS) -> None:
        super().__init__("a", clock, orders)
        self.tries: list[Try] = []
        self.suspected: list[str] = []
        self.results: list[RoundDone | RoundFailed] = []
        self.own = OwnReducer(self.context)
        self.contributor = Contributor(self.context, self.own, self, self)
        self.on_view(view("abc"))
        self.begin(Begin(2, 7, GROUP, torch.ones(ELEMENTS * len(orders)), weight=5))

    def begin(self, begin: Begin) -> None:
        self.begun = asyncio.ensure_future(self.contributor.begin(begin))
        self.settle()

    def open(self, peer: str, method: str) -> Try:
        self.tries.append(Try(peer, self.settle))
        return self.tries[-1]

    def suspect(self, peer: str) -> None:
        self.suspected.append(peer)

    def finished(self, result: RoundDone | RoundFailed) -> None:
        self.results.append(result)

    def on_view(self, seen: View) -> None:
        self.own.on_view(seen)
        self.contributor.on_view(seen)
        self.settle()

    def tick(self, now: float) -> None:
        self.now = now
        self.contributor.tick()
        self.settle()

    def reduced_here(self) -> None:
        header = wire.ReductionHeader(GROUP, (), 2, SIZE, wire.hash64(MEAN), "c")
        self.own.tries[-1].set_result(wire.Reduction(header, wire.Payload(MEAN, header.hash)))
        self.settle()

    def ended(self, kind: type[T]) -> T:
        (result,) = self.results
        assert isinstance(result, kind)
        return result


@pytest.mark.parametrize(
    ("ends", "suspects"),
    [
        (Try.breaks, True),
        (lambda tried: (tried.gives(None), tried._settle()), True),
        (lambda tried: tried.refuses("again"), False),
        (lambda tried: (tried.gives(b"\xff"), tried._settle()), False),
        (lambda tried: tried.says(resume=pb.Resume(offset=4)), False),  # nobody has asked
        (lambda tried: tried.brings(), False),
    ],
)
def test_a_try_that_came_to_nothing_is_resumed_at_the_same_peer(clock, ends, suspects):
    made = Contributing(clock, orders=FROM_AFAR)
    made.now = 1.0
    ends(made.tries[0])
    assert (made.suspected, made.tries[0].cancelled) == (["b"] if suspects else [], True)
    made.tick(1.0 + RETRY_S - 0.01)
    assert len(made.tries) == 1
    made.tick(1.0 + RETRY_S)
    again = made.tries[1]
    assert (again.key, again.frames) == ((0, "b", True), [])  # it asks first what is there
    again.says(resume=pb.Resume(offset=12))
    assert again.frames == [12]


@pytest.mark.parametrize(("window", "at_once"), [(layouts.BYTES, 1), (layouts.BYTES - 1, 4)])
def test_shards_above_a_window_go_to_a_peer_several_at_once(clock, window, at_once, monkeypatch):
    """Eight streams fill a long link, half of them to each of two others. Here none is read."""
    frames: list[bytes] = []

    async def unread(_: Try, message: bytes) -> None:
        if pb.ExchangeUp.FromString(message).HasField("frame"):
            frames.append(message)
            await asyncio.Event().wait()

    monkeypatch.setattr(contributor, "WINDOW_BYTES", window)
    monkeypatch.setattr(Try, "send", unread)
    Contributing(clock, orders=FROM_AFAR * 6)
    assert len(frames) == at_once


def test_a_reducer_that_is_overdue_is_passed_over(clock):
    """Counted from when half of the round is here: before, all may wait for the same late peer."""
    made = Contributing(clock)
    made.passes_s = 1e-6
    made.tick(5.0)
    made.tries[0].reduces()
    made.tick(OVERDUE_S + 4.9)
    assert (made.own.passed_over, len(made.tries)) == ([], 2)
    made.reduced_here()
    made.tick(OVERDUE_S + 4.9 + OVERDUE_S + 0.1)
    made.tick(OVERDUE_S + 4.9 + OVERDUE_S + 0.2)
    assert made.own.passed_over == [(2, "c")]
    assert len(made.own.tries) == 2  # its own reducer is the next in the order


def test_a_reducer_whose_answers_are_of_no_use_is_passed_over(clock):
    made = Contributing(clock, orders=FROM_AFAR)
    for number in range(3):
        assert made.tries[-1].key[:2] == (0, "b")
        made.tries[number].begins(codec=99)
        made.tick(number + 1.0)
    assert made.own.passed_over == [(0, "b")]
    assert made.tries[3].key == (0, "c", False)


def test_what_was_kept_of_a_reduction_is_dropped_when_the_next_does_not_fit(clock):
    for wrong in [
        {"total_bytes": 24},
        {"codec": 99},
        {"last": "d"},
        {"hash": 10},
        {"lefts": ()},
        {"joiners": tuple("defgh")},
        {"joiners": ("d", "d")},
        {"contributors": "aabc"},
        *({"factors": bad} for bad in ((0.5,), (0.0, 1.0, 1.0), (1.0, 1.5, 1.0))),
    ]:
        made = Contributing(clock, orders=FROM_AFAR)
        made.tries[0].begins()
        made.tries[0].brings(0, 14)
        made.tries[0].breaks()
        made.tick(1.0)
        made.tries[1].begins(**wrong)
        made.tick(2.0)
        assert made.tries[2].header.reduction_offset == 0, wrong


def test_what_a_round_came_to(clock):
    made = Contributing(clock)
    made.tries[0].begins("abc", joiners=("d",))  # the second of three shards: it is round 7
    made.tries[0].brings()
    made.tries[1].reduces("bc")
    assert made.results == []
    made.reduced_here()
    done = made.ended(RoundDone)
    assert (done.contributors, done.next_group) == (2, ("a", "b", "c", "d"))
    assert (done.missed, done.waited_for) == (((20, 30),), "c")
    assert [peers for *_, peers in done.parts] == [GROUP, GROUP, ("b", "c")]
    made.tick(ROUND_S + 1)
    assert len(made.results) == 1


@pytest.mark.parametrize("kind", ["group", "pruned", "invalid", "run"])
def test_the_refusals_of_most_end_the_round_and_the_other_streams(clock, kind):
    """In a swarm of two that of the other one."""
    made = Contributing(clock)
    made.tries[0].refuses(kind, "no")
    assert made.results == []
    made.tries[1].refuses(kind, "no")
    failed = made.ended(RoundFailed)
    assert (failed.reason, failed.waiting_for) == ("c: no", ("a", "b", "c"))
    assert made.own.tries[0].cancelled()
    made = Contributing(clock, orders=("abc", "bca"))
    made.reduced_here()
    made.tries[0].refuses(kind, "no")
    failed = made.ended(RoundFailed)
    assert (failed.reason, failed.counted) == ("b: no", ((0, 10),))


def test_one_of_two_that_refuses_is_passed_over(clock):
    made = Contributing(clock)
    made.tries[0].reduces()
    for number in range(1, 4):
        made.tries[number].refuses("pruned", "no")
        made.tick(number * RETRY_S)
    assert (made.results, made.own.passed_over) == ([], [(2, "c")])


def test_a_round_that_is_begun_again_ends_the_one_before_without_a_word(clock):
    made = Contributing(clock, orders=FROM_AFAR)
    made.begin(Begin(2, 8, GROUP, torch.ones(ELEMENTS)))
    assert made.tries[0].cancelled
    made.tries[1].reduces()
    assert made.ended(RoundDone).round == 8


def test_the_deadline_ends_the_round_with_the_reasons_and_who_did_not_answer(clock):
    made = Contributing(clock)
    made.reduced_here()
    made.tries[0].breaks()
    made.tick(ROUND_S - 0.01)
    assert made.results == []
    made.tick(ROUND_S)
    failed = made.ended(RoundFailed)
    assert failed.reason == "the round's deadline has passed; b: reset"
    assert failed.waiting_for == ("b", "c")
