"""Calls at a stage: refused, broken off, failed or repeated; with whom a peer gossips when one
names other measurements than it plans with; and whom it asks where a replica fails."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.membership import Health, Member
from murmuration.worker.pipeline.barrier import IterationTracker
from murmuration.worker.pipeline.forwarder import Forwarder
from murmuration.worker.pipeline.planner import RoutePlanner, snapshot_name
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.server import StageServer
from murmuration.worker.pipeline.stage_call import (
    Hop,
    MicrobatchDropped,
    PeerProcess,
    StageCall,
    StageCallKey,
    StageReply,
    call_header,
)
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training.mailbox import IterationOver, JobKind, StageJob, StageJobDone
from murmuration.worker.transport import TransportError
from tests.protocol.virtual_time import run
from tests.unit.worker.pipeline.members import context_of, members_of, telling

ITERATION = 2
PLACED = members_of(0, 0, 1, 2)
"""p0 and p1 are origins; what they begin goes by way of p2 to p3."""

ORIGIN = PeerProcess.of(PLACED[0])
VALUES = memoryview(bytes(16))


def measured(seconds: float) -> list[Member]:
    return [*PLACED[:2], telling(PLACED[2], Profile(forward_s=seconds)), PLACED[3]]


class Stream:
    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages, self.answers = list(messages), list[pb.StageCallDown]()

    async def send(self, message: bytes) -> None:
        self.answers.append(pb.StageCallDown.FromString(message))

    async def done(self) -> None: ...

    async def receive(self) -> bytes | None:
        return self._messages.pop(0) if self._messages else None

    def cancel(self) -> None: ...


class Next(Forwarder):
    async def send(self, call: StageCall, values: memoryview) -> StageReply:
        return StageReply(values, ("p3",))


class Peer:
    """In an iteration; its train thread answers at once, as it is told to or with what it got."""

    def __init__(self, me: str = "p2", memory_bytes: int = 1000) -> None:
        self.members, self.now, self.suspected = measured(0.1), 0.0, list[str]()
        self.problems: dict[JobKind, str] = {}
        config = StagesConfig(count=3, microbatches=2, memory_mib=memory_bytes / 2**20)
        given = {"config": config, "suspect": self.suspected.append, "clock": lambda: self.now}
        self.context = context_of(me, lambda: self.members, post=self._post, **given)
        self.tracker = IterationTracker(ITERATION)
        planner, self.reports = RoutePlanner(self.context), 0
        following = Next(self.context)
        self.server = StageServer(self.context, self.tracker, following, planner, self._hear)

    def _hear(self) -> None:
        self.reports += 1

    def _post(self, message: StageJob) -> None:
        problem = self.problems.get(message.kind, "")
        self.context.computed(StageJobDone(message.number, message.values, problem=problem))

    async def called(
        self,
        microbatch: int = 0,
        iteration: int = ITERATION,
        origin: PeerProcess = ORIGIN,
        sender: str = "p0",
        snapshot: int = 0,
        whole: bool = True,
    ) -> str:
        """Sends a whole microbatch, or only its header; returns how the answer ends."""
        context, payload = self.context, wire.Payload.of(VALUES)
        key = StageCallKey(iteration, origin, microbatch)
        call = StageCall(key, context.stage, (), (1, 1, 4), snapshot, sender)
        messages = [call_header(call, context.run, context.codec, payload)]
        if whole:
            messages += [m for m, _, _ in wire.payload_messages(pb.StageCallUp, payload)]
        stream = Stream(messages)
        await self.server.serve(stream)
        last = next(a for a in stream.answers if a.WhichOneof("body") in ("gradient", "failed"))
        if last.HasField("failed"):
            return "elsewhere" if last.failed.elsewhere else "dropped"
        return "gradient"

    def refuses(self, origin: str, sender: str, snapshot: int) -> None:
        """A call of an iteration that is over, planned with that snapshot."""
        past = self.called(0, ITERATION - 1, PeerProcess(origin, 1), sender, snapshot, whole=False)
        assert asyncio.run(past) == "elsewhere"

    @property
    def gossiped(self) -> tuple[list[str], int]:
        """The suspects, and how many origins are said to plan with other measurements."""
        return self.suspected, self.context.counts.other_snapshots

    def over(self) -> IterationOver | None:
        return self.tracker.over(PLACED[:1], 0.0)


def test_the_origin_is_asked_and_not_who_has_passed_its_call_on():
    """p2 only forwards the name; once for each origin and iteration."""
    peer, others = Peer("p3"), snapshot_name(measured(0.3))
    for origin in ("p0", "p0", "p1"):
        peer.refuses(origin, "p2", others)
    assert peer.gossiped == (["p0", "p1"], 2)
    peer.server.begin(ITERATION + 1)
    peer.refuses("p0", "p2", others)
    assert peer.gossiped == (["p0", "p1", "p0"], 3)


def test_figures_that_change_while_an_iteration_runs_are_no_disagreement():
    peer, before = Peer("p3"), snapshot_name(measured(0.1))
    peer.refuses("p0", "p2", before)
    peer.members = measured(0.3)
    peer.refuses("p0", "p2", before)
    assert peer.gossiped == ([], 0)
    peer.now = 60.0  # the origin has not heard of it in all this time
    peer.refuses("p0", "p2", before)
    assert peer.gossiped == (["p0"], 1)


async def test_a_microbatch_that_has_not_arrived_has_not_begun_here():
    """Its origin sends it to another replica, and is lost: it is that one's to tell."""
    peer = Peer()
    assert await peer.called(0, whole=False) == "elsewhere"
    assert await peer.called(1) == "gradient"
    peer.tracker.reported(ITERATION, PeerProcess("other", 1), [])
    gone, other = replace(PLACED[0], health=Health.DEAD), replace(PLACED[0], peer="other")
    assert peer.tracker.over([gone, other], 0.0) == IterationOver(ITERATION, discard=False)
    assert peer.tracker.orphans(ITERATION)[ORIGIN] == ({1}, {1})


async def test_a_call_from_far_ahead_is_not_waited_with():
    """Another replica may be there. A little later this one will be."""
    peer = Peer()
    assert await peer.called(iteration=5000) == "elsewhere"
    soon = asyncio.ensure_future(peer.called(iteration=ITERATION + 1))
    await asyncio.sleep(0)
    assert not soon.done()
    peer.tracker.begin(ITERATION + 1)
    peer.server.begin(ITERATION + 1)
    assert await soon == "gradient"


async def test_a_backward_that_fails_leaves_what_was_counted_before():
    for before in [(), (0, 1)]:
        peer = Peer(memory_bytes=len(VALUES))  # one answer is kept
        for microbatch in before:
            assert await peer.called(microbatch) == "gradient", before
        peer.problems[JobKind.BACKWARD] = "damaged"
        assert await peer.called(0) == "dropped", before
        peer.tracker.reported(ITERATION, ORIGIN, before)
        assert peer.over() == IterationOver(ITERATION, discard=False), before


def report(**other: Any) -> bytes:
    usual = {"run": 1, "origin": "p0", "start_ms": 1, "iteration": ITERATION, "counted": [0]}
    return pb.FinishedRequest(**usual | other).SerializeToString()


def test_no_member_fills_a_table_of_a_stage():
    async def scenario() -> None:
        peer = Peer()
        peer.context.clock, tracker = asyncio.get_running_loop().time, peer.tracker
        for start_ms in range(20):
            await peer.server.finished(report(start_ms=start_ms, counted=[]))
            assert await peer.called(origin=PeerProcess(f"x{start_ms}", 1)) == "dropped"
        assert (len(tracker._reported), len(tracker._heard), peer.gossiped) == (2, 2, ([], 0))
        assert await peer.called(origin=PeerProcess("x" * 1000, 1)) == "elsewhere"
        with pytest.raises(wire.WireError, match="more than its origin has"):
            await peer.server.finished(report(counted=[2]))

    run(scenario())


def test_an_answer_waits_for_the_end_of_the_iteration():
    async def scenario() -> None:
        peer, loop = Peer(), asyncio.get_running_loop()

        def ends() -> None:
            peer.tracker.ended = ITERATION
            peer.server.over(ITERATION)

        async def answered() -> tuple[bool, float]:
            """Tells whether the iteration is said to be over, and after how long (s)."""
            began = loop.time()
            reply = pb.FinishedReply.FromString(await peer.server.finished(report()))
            return reply.over, loop.time() - began

        over, waited_s = await answered()
        assert not over
        assert waited_s > 0
        loop.call_later(waited_s / 2, ends)
        assert await answered() == (True, pytest.approx(waited_s / 2))
        assert await answered() == (True, 0)
        assert peer.reports == 3
        with pytest.raises(wire.WireError, match="another run"):
            await peer.server.finished(report(run=2))
        assert peer.reports == 3

    run(scenario())


def called(taken_s: float = 0.1, held_s: float = 0.0) -> Stream:
    """A call to a peer that takes a microbatch after so long, or refuses it, and holds it."""
    payload, down = wire.Payload.of(VALUES), pb.StageCallDown
    gradient = down(gradient=pb.Gradient(total_bytes=16, hash=payload.hash))
    messages = [each.SerializeToString() for each in (down(received=pb.Received()), gradient)]
    stream = Stream([*messages, *(m for m, _, _ in wire.payload_messages(down, payload))])
    receive, waits_s = stream.receive, [taken_s, held_s]

    async def later() -> bytes | None:
        if (wait_s := waits_s.pop(0) if waits_s else 0.0) < 0:
            raise TransportError("refused")
        await asyncio.sleep(wait_s)
        return await receive()

    stream.receive, stream.send = later, AsyncMock()
    return stream


# How often it goes by a replica of stage 1, or by none back to its origin; who is asked; delays.
ASKED = {
    "who holds, where the other fails": [
        (1, "p1", ["p1", "p2"], {"p1": (0.1, math.inf)}),
        (1, "p1", ["p2", "p1"], {"p2": (-1.0, 0.0)}),
    ],
    "who is late, before one that holds": [
        (20, "p2", ["p2"], {}),
        (6, "p2", ["p2"], {"p2": (0.1, 5.0)}),
        (1, "p1", ["p1", "p2"], {"p1": (0.1, math.inf)}),
        (1, "p1", ["p2"], {}),
    ],
    "who is late, before one that is silent": [
        (20, "p2", ["p2"], {}),
        (6, "p2", ["p2"], {"p2": (0.1, 5.0)}),
        (12, "p1", ["p1"], {"p1": (0.1, 5.0)}),
        (6, "p2", ["p2"], {"p2": (0.1, 5.0)}),
        (1, "p1", ["p1", "p2"], {"p1": (math.inf, 0.0)}),
        (1, "p1", ["p2"], {}),
    ],
    "who waits once a period": [
        (1, "p1", ["p1"], {"p1": (20.0, 0.0)}),
        (200, "p1", ["p1"], {}),
        (1, "p1", ["p1"], {"p1": (20.0, 0.0)}),
    ],
    "an origin, for its loss": [(1, "", ["p0"], {"p0": (0.1, math.inf)})],
}


@pytest.mark.parametrize("calls", ASKED.values(), ids=ASKED)
def test_who_is_asked(calls):
    asked, told, delays = list[str](), list[dict[str, Any]](), dict[str, Any]()

    def opened(peer: str, *_: object) -> Stream:
        asked.append(peer)
        return called(*delays.get(peer, ()))

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        context = context_of("p0", lambda: members_of(0, 1, 1), log=told.append, clock=clock)
        context.transport.open = opened
        forwarder, key = Forwarder(context), StageCallKey(ITERATION, ORIGIN, 0)
        for times, by, expected, waits_s in calls:
            rest, _ = (Hop(1, by),) if by else (), delays.update(waits_s)
            for _ in range(times):
                asked.clear()
                with suppress(MicrobatchDropped):
                    await forwarder._send_on(StageCall(key, 0, rest, (1, 1, 4), 0, ""), VALUES)
                assert asked == expected
            delays.clear()

    run(scenario())
    assert not any("p0 " in event.get("text", "") for event in told)
