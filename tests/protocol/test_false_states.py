"""A member announces a state that nobody else has, and gives it to whoever asks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.catchup.repair import JumpLimit
from murmuration.worker.membership import Digest, Member, Phase
from murmuration.worker.transport import Caller, Stream
from tests.protocol.problem import steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.memory_transport import MemoryTransport

VALUES = 300


class Liar:
    """Answers gossip as a member that is done, `ahead` rounds before the others, and confirms
    whatever it is asked about.

    Args:
        value: of the anchor that it gives; odd: the hash that it announces is of another one.
        gives: how many versions the state that it gives differs from the announced one.
    """

    def __init__(
        self, swarm: Swarm, ahead: int, value: float, *, odd: bool = False, gives: int = 0
    ) -> None:
        self._swarm, self._gives = swarm, gives
        self._anchor, self._momentum = torch.full((VALUES,), value), torch.zeros(VALUES)
        self._hash = wire.state_hash(self._anchor, self._momentum, ("x",))
        honest = swarm["a"]
        self._version, self._run = honest.versions[0] + ahead, swarm.problem.manifest.run
        announced = pb.FragmentDigest(
            version=self._version, contributors=4, hash=self._hash + (1 if odd else 0)
        )
        self.card = pb.Member(
            peer="x",
            address="x",
            epoch=1,
            phase=pb.PHASE_DONE,
            step=honest.trainer.step + 5 * ahead,
            digests=[announced],
        )
        self.fetched, self.restarts = 0, False

    async def start(self) -> None:
        await MemoryTransport(self._swarm.network, "x").listen(self)
        for peer in self._swarm.alive:
            await peer.node.server.on_call("Control/Gossip", self._said())

    def _said(self) -> bytes:
        said = pb.GossipMessage(sender="x", run=self._run, members=[self.card])
        return said.SerializeToString()

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return self._said()

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        if method != "Data/Fetch":
            return
        request = pb.FetchRequest.FromString(await stream.receive() or b"")
        header = pb.StateHeader(
            version=self._version + self._gives,
            contributors=4,
            group=["x"],
            total_bytes=8 * VALUES,
            hash=self._hash,
            step=self.card.step,
        )
        await stream.send(pb.FetchReply(header=header).SerializeToString())
        if not request.versions:
            self.fetched += 1
            if self.restarts:
                self.card.epoch += 1
                del self.card.digests[:]
                for peer in self._swarm.alive:
                    await peer.node.server.on_call("Control/Gossip", self._said())
            parts = wire.state_parts(self._anchor, self._momentum)
            for message, _ in wire.frame_messages(pb.FetchReply, parts):
                await stream.send(message)


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ({"ahead": 6, "value": 3.0}, "no other peer has its state"),
        ({"ahead": 6, "value": float("nan")}, "NaN"),
        ({"ahead": 6, "value": 3.0, "odd": True}, "another state than the announced"),
        ({"ahead": 6, "value": 3.0, "gives": 9000}, "announced was"),
        ({"ahead": 6, "value": 3.0, "gives": -1}, "another state than the announced"),
        ({"ahead": 5000, "value": 3.0}, "nobody can be at"),
    ],
    ids=["random", "NaN", "another hash", "far ahead", "older", "too far"],
)
def test_a_state_that_nobody_else_has_is_not_taken(lie: dict[str, Any], says: str) -> None:
    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await Liar(swarm, **lie).start()
            await swarm.sleep(30)
            for peer in swarm.alive:
                assert peer.of_kind("adopted") == []
                assert peer.versions >= (11,)
            told = [str(event["text"]) for event in swarm["a"].of_kind("warning")]
            assert any(says in text for text in told), told

    run(scenario())


def test_rounds_that_take_long_do_not_stand_still() -> None:
    """Half a minute each, in which the liar is asked again and again."""

    async def scenario() -> None:
        async with Swarm(steady(100_000, inner_steps=60)) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 200)
            liar = Liar(swarm, 20, 3.0)
            await liar.start()
            await swarm.sleep(120)
            assert liar.fetched > 3
            for peer in swarm.alive:
                assert peer.of_kind("adopted") == []
                assert peer.versions >= (5,)

    run(scenario())


def test_a_donor_that_starts_again_meanwhile_harms_nobody() -> None:
    async def scenario() -> None:
        async with Swarm(steady(100_000)) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            liar = Liar(swarm, 6, 3.0)
            liar.restarts = True
            await liar.start()
            await swarm.until(lambda: liar.fetched > 0, 30)
            await swarm.sleep(10)
            assert [peer.of_kind("adopted") for peer in swarm.alive] == [[], [], []]
            assert swarm["a"].versions >= (5,)

    run(scenario())


def test_alone_with_a_liar_a_peer_takes_its_word_and_says_so() -> None:
    async def scenario() -> None:
        async with Swarm(steady(1000)) as swarm:
            await swarm.start("a")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await Liar(swarm, 6, 3.0).start()
            await swarm.until(lambda: bool(swarm["a"].of_kind("adopted")), 30)
            (adopted,) = swarm["a"].of_kind("adopted")
            assert (adopted["donor"], adopted["confirmed_by"]) == ("x", [])

    run(scenario())


def test_a_joiner_is_told_by_two() -> None:
    async def scenario() -> None:
        async with Swarm(steady(200)) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            await swarm.join("c", via=["a"])
            await swarm.until(lambda: bool(swarm["c"].of_kind("adopted")), 30)
            (adopted,) = swarm["c"].of_kind("adopted")
            confirmed_by = adopted["confirmed_by"]
            assert isinstance(confirmed_by, list)
            assert {adopted["donor"], *confirmed_by} == {"a", "b"}

    run(scenario())


def test_a_joiner_is_not_held_up_by_a_liar() -> None:
    async def scenario() -> None:
        async with Swarm(steady(200)) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
            liar = Liar(swarm, 6, 3.0)
            await liar.start()
            await swarm.join("c", via=["a"])
            await swarm.until(lambda: bool(swarm["c"].of_kind("adopted")), 30)
            assert liar.fetched > 0
            assert {event["donor"] for event in swarm["c"].of_kind("adopted")} <= {"a", "b"}

    run(scenario())


def at(version: int, step: int) -> Member:
    return Member("w1", "host:1", 1, phase=Phase.TRAINING, step=step, digests=digests(version))


def digests(*versions: int) -> tuple[Digest, ...]:
    return tuple(Digest(version, 2, 7) for version in versions)


@pytest.mark.parametrize(
    ("version", "step", "possible"),
    [(10, 100, True), (14, 140, True), (40, 100, False), (10, 500, False), (8, 80, True)],
)
def test_how_far_the_others_can_be(version: int, step: int, possible: bool) -> None:
    """At one step a second, from step 90 to 100: at most 16 times as many, and four rounds."""
    limit = JumpLimit(10)
    mine: Sequence[Digest] = digests(10)
    assert limit.possible(at(10**9, 10**9), mine, 100, 0.0), "nothing is known yet"
    for second in range(11):
        limit.advance(90 + second, 1.0, float(second))
    assert limit.possible(at(version, step), mine, 100, 10.0) == possible
    # A peer that stood still for a minute finds the others far ahead.
    assert limit.possible(at(version, step), mine, 100, 70.0)
