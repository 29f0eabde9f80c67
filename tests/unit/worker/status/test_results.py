"""Results are given to all that live, within bounds, and those of the done are waited for."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack, unpack
from murmuration.worker import wire
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.status.results import ResultExchange
from murmuration.worker.transport import Unreachable

RUN = 7


def member(name: str, phase: Phase = Phase.DONE, health: Health = Health.ALIVE) -> Member:
    return Member(name, f"{name}:7700", 1, phase=phase, health=health, step=90)


class Peers:
    """Peers that reach each other, a clock, and who does not answer."""

    def __init__(self, *names: str) -> None:
        self.members = [member(name) for name in names]
        self.now_s, self.deaf, self.calls = 0.0, set[str](), 0
        self.gossip = self.transport = self
        self.clock = lambda: self.now_s
        self.results = {name: ResultExchange(name, RUN, self) for name in names}
        self.work: list[Coroutine[None, None, None]] = []
        for each in self.results.values():
            each.on_view(View())

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self.work.append(work)

    async def call(
        self, address: str, method: str, request: bytes, timeout_s: float, peer: str
    ) -> bytes:
        self.calls += 1
        if peer in self.deaf:
            raise Unreachable(peer)
        assert (address, method) == (f"{peer}:7700", "Control/Result")
        return await self.results[peer].on_result(request)

    def run(self, seconds: float = 2.0) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            for each in self.results.values():
                each.tick()
            work, self.work = self.work, []
            for one in work:
                asyncio.run(one)
            self.now_s += 0.05

    def results_at(self, name: str) -> dict[str, Any]:
        peers: Any = self.results[name].document()["peers"]
        return {each["peer"]: each["result"] for each in peers}


def test_nobody_waits_for_a_peer_that_it_cannot_reach():
    peers = Peers("a", "b", "c")
    peers.members[0] = replace(peers.members[0], unreachable=("c",))
    for name in "ab":
        peers.results[name].share({"by": name})
    peers.run()
    assert peers.results["a"].is_complete()
    assert not peers.results["b"].is_complete()  # which reaches c
    assert set(filter(peers.results_at("c").get, "abc")) == {"b"}
    peers.members[1] = replace(peers.members[1], start_ms=2)
    peers.results["c"].on_view(View())
    assert not any(peers.results_at("c").values())  # it was of b's earlier process


def test_only_those_that_are_done_are_waited_for_and_the_dead_are_named():
    peers = Peers("a", "b", "c", "d")
    dead, left = (member(n, health=h) for n, h in (("c", Health.DEAD), ("d", Health.LEFT)))
    peers.members[1:] = [member("b", Phase.TRAINING), dead, left]
    a = peers.results["a"]
    a.on_view(View())
    a.share({"step": 100})
    peers.run()
    assert a.is_complete()
    assert peers.results_at("b")["a"] == {"step": 100}
    peers.members[1:] = []  # what membership forgets is remembered here
    a.on_view(View())
    found: Any = a.document()["peers"]
    states = [(each["peer"], each["state"]) for each in found]
    assert states == [("a", "done"), ("b", "training"), ("c", "dead"), ("d", "left")]
    assert {each["step"] for each in found} == {90}


def test_a_peer_that_does_not_answer_is_asked_three_times():
    peers = Peers("a", "b")
    peers.deaf.add("b")
    peers.results["a"].share({"step": 1})
    peers.run(10.0)
    assert peers.calls == 3
    assert peers.results["a"].is_given()
    assert not peers.results["a"].is_complete()


def test_long_results_are_cut_to_what_a_call_takes():
    peers, curve = Peers("a", "b"), [(step, step * 0.37) for step in range(100_000)]
    noise = "".join(chr(33 + step * 7919 % 90) for step in range(200_000))
    peers.results["a"].share({"step": 5, "train_loss_curve": curve, "sample": noise})
    peers.run()
    given = peers.results_at("b")["a"]
    assert len(given["train_loss_curve"]) <= 401
    assert given["train_loss_curve"][-1] == [99_999, 99_999 * 0.37]
    assert len(pack(given)) <= 60 * 1024
    assert given["step"] == 5


@pytest.mark.parametrize(
    ("run", "document"), [(8, pack({})), (RUN, b"damaged"), (RUN, bytes(70_000))]
)
async def test_what_is_no_result_is_refused(run, document):
    peers, asked = Peers("a", "b"), pb.ResultRequest(run=run, sender="b", document=document)
    with pytest.raises(wire.WireError):
        await peers.results["a"].on_result(asked.SerializeToString())
    assert peers.results_at("a")["b"] is None


async def test_nobody_gives_a_result_in_anothers_place_and_an_empty_one_says_nothing():
    peers = Peers("a", "b")
    peers.results["a"].share({"step": 3})
    own = pb.ResultRequest(run=RUN, sender="a", document=pack({"step": 99})).SerializeToString()
    answer = await peers.results["a"].on_result(own)
    assert unpack(pb.ResultReply.FromString(answer).document, 100) == {"step": 3}
    assert peers.results_at("a")["a"] == {"step": 3}
    assert wire.claimed_sender("Control/Result", own) == "a"
