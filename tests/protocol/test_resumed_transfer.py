"""A donor breaks off, or falls silent: what has arrived stays, and another gives the rest."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.counted import CountedRound
from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.catchup.donors import fetch_states, serve_states
from murmuration.worker.catchup.held_states import HeldStates
from murmuration.worker.membership import Member, Phase
from murmuration.worker.training.mailbox import Published
from murmuration.worker.transport import Caller, Refused, Stream, TransportError
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm, inline
from tests.protocol.taps import Passing
from tests.protocol.virtual_time import run
from tests.support.memory_transport import MemoryNetwork, MemoryTransport

ELEMENTS, RUN = 700_000, 7
FRAMES = 6  # of 1 MiB, of anchor and momentum


def state(seed: int) -> FragmentState:
    drawn = torch.Generator().manual_seed(seed)
    anchor, momentum = (torch.randn(ELEMENTS, generator=drawn) for _ in range(2))
    hashed = wire.state_hash(anchor, momentum, ("a",))
    return FragmentState(3, 1, ("a",), anchor, momentum, hashed)


class Donor:
    """Gives a state slowly, or breaks off after some frames; counts those that it has given.

    Args: spoils: the last frame is of other values, with a hash of its own; silent: it stays there
    where it breaks off, and says nothing."""

    def __init__(
        self,
        given: FragmentState,
        breaks_after: int = 100,
        *,
        spoils: bool = False,
        silent: bool = False,
    ):
        self._published = Published(Phase.DONE, 9, 9, (given,), (), 0.1)
        self._breaks_after, self._spoils, self._silent = breaks_after, spoils, silent
        self.frames, self.byte_s = 0, 0.0

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        raise Refused(method)

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        self._stream = stream
        with suppress(Refused):
            await serve_states(self, RUN, self._published, HeldStates())

    async def receive(self) -> bytes | None:
        return await self._stream.receive()

    async def send(self, message: bytes) -> None:
        reply = pb.FetchReply.FromString(message)
        if reply.HasField("frame"):
            if self.frames == self._breaks_after:
                if self._silent:
                    await asyncio.Event().wait()
                raise Refused("killed")
            self.frames += 1
            await asyncio.sleep(self.byte_s * len(reply.frame.payload))
            if self._spoils and len(reply.frame.payload) < wire.MAX_FRAME_BYTES:
                reply.frame.payload = bytes(len(reply.frame.payload))
                reply.frame.hash = wire.hash64(reply.frame.payload)
        await self._stream.send(reply.SerializeToString())

    async def done(self) -> None:
        """Served streams end with their handler."""

    def cancel(self) -> None:
        """Likewise."""


async def fetched(
    *donors: Donor, at_once: bool = False
) -> tuple[list[int], dict[int, FragmentState] | str]:
    """(frames that each donor has given, what the last one led to).

    Args: at_once: the others help the first."""
    network, begun = MemoryNetwork(0.01), dict[int, wire.Incoming]()
    joiner = MemoryTransport(network, "joiner")
    outcome: dict[int, FragmentState] | str = ""
    members = [Member(f"donor {index}", f"donor {index}", 1) for index in range(len(donors))]
    for member, donor in zip(members, donors, strict=True):
        await MemoryTransport(network, member.address).listen(donor)
        donor.byte_s = 22e-6 if at_once else 12e-6
    for first, *helpers in [members] if at_once else [[each] for each in members]:
        expected = {0: (ELEMENTS, ELEMENTS)}
        try:
            _, outcome = await fetch_states(
                joiner, first, RUN, expected, inline, (25.0, 8e-6), begun, helpers
            )
        except (TransportError, TimeoutError, wire.WireError) as error:
            outcome = str(error)
    return [donor.frames for donor in donors], outcome


@pytest.mark.parametrize("silent", [False, True], ids=["breaks off", "silent"])
@pytest.mark.parametrize("before", [0, 1, 4, FRAMES])
def test_only_what_is_missing_comes_from_the_next_donor(before, silent):
    frames, states = run(fetched(Donor(state(0), before, silent=silent), Donor(state(0))))
    assert frames == [before, FRAMES - before]
    assert isinstance(states, dict)
    assert torch.equal(states[0].anchor, state(0).anchor)
    assert states[0].hash == state(0).hash
    told = replace(states[0], history=(CountedRound(2, ((0, ELEMENTS, ("a",)),)),))
    for given, known in ((told, set()), (replace(told, told_until=0), {"a"})):
        (held := HeldStates()).add((given,))  # after a restart
        assert held.contributors == known, "a donor's word of a history gives nobody a vote"


def test_another_state_begins_anew():
    frames, states = run(fetched(Donor(state(0), 4), Donor(state(1))))
    assert frames == [4, FRAMES]
    assert isinstance(states, dict)
    assert states[0].hash == state(1).hash


def test_a_part_that_does_not_fit_costs_the_whole_once():
    """Nobody knows which donor has lied, so nothing is kept of either."""
    liar = Donor(state(0), spoils=True)
    frames, states = run(fetched(Donor(state(0), 4), liar, Donor(state(0))))
    assert frames == [4, 2, FRAMES]
    assert isinstance(states, dict)


@pytest.mark.parametrize(
    ("donors", "given"),
    [
        ((100, 100, 100), [2, 2, 4]),
        ((100, 1, 100), [3, 1, 4]),
        ((0, 100, 100), [0, 4, 4]),
        ((100, "another state", 100), [4, 0, 4]),
        ((2, 1, 0), "3 of 6 chunks are missing"),
        ((100, 100, "a liar"), "fragment 0 is damaged"),
    ],
)
def test_several_donors_give_chunks_at_once(donors, given, monkeypatch):
    """Frames after which each breaks off, and which each has given."""
    monkeypatch.setattr("murmuration.worker.catchup.donors.CHUNK_BYTES", 1 << 20)
    other = {"another state": Donor(state(1)), "a liar": Donor(state(0), spoils=True)}
    made = [other[e] if isinstance(e, str) else Donor(state(0), e) for e in donors]
    frames, states = run(fetched(*made, at_once=True))
    if isinstance(states, str):
        assert isinstance(given, str)
        assert given in states
    else:
        assert frames == given
        assert torch.equal(states[0].momentum, state(0).momentum)


@pytest.mark.parametrize("lies", [False, True], ids=["honest", "liar"])
async def test_a_joiner_fetches_chunks_from_all_that_hold_a_state(lies, monkeypatch):
    """And all of it from the donor where a chunk does not fit. None is blamed, for nobody knows."""
    monkeypatch.setattr("murmuration.worker.catchup.donors.CHUNK_BYTES", 1 << 12)
    plan = Plan(inner_steps=40, fragments=2)
    async with Swarm(Problem(layers=(3000, 2000), plan=plan, steps=400), "abc") as swarm:
        await swarm.until(lambda: min(swarm["a"].versions) >= 1, 100)
        gave = Counter[str]()

        def tap(passing: Passing) -> bytes:
            if (passing.source, passing.method, passing.up) != ("d", "Data/Fetch", False):
                return passing.message
            reply = pb.FetchReply.FromString(passing.message)
            gave[passing.target] += len(reply.frame.payload)
            if lies and passing.target == "c" and reply.HasField("frame"):
                reply.frame.payload = bytes(len(reply.frame.payload))
                reply.frame.hash = wire.hash64(reply.frame.payload)
            return reply.SerializeToString()

        swarm.tap = tap
        joiner = await swarm.join("d", via="abc")
        await swarm.until(lambda: bool(joiner.of_kind("adopted")), 60)
        whole, donor = 8 * 5000, joiner.of_kind("adopted")[0]["donor"]
        assert min(gave[name] for name in "abc") >= 1 << 12
        assert (gave[donor] > whole, joiner.warnings) == (lies, [])


class Slow:
    """A served stream of a donor that gives a byte of a state in ten seconds. Args: slow: the names
    of these; of the first `most` donors that are asked for one."""

    def __init__(self, stream: Stream, donor: str, slow: list[str], most: int) -> None:
        self._donor, self._slow, self._most, self._send = donor, slow, most, stream.send
        self.receive, self.done, self.cancel = stream.receive, stream.done, stream.cancel

    async def send(self, message: bytes) -> None:
        reply = pb.FetchReply.FromString(message)
        if reply.header.total_bytes and self._donor not in self._slow[: self._most]:
            self._slow.append(self._donor)
        if payload := self._donor in self._slow[: self._most] and reply.frame.payload:
            for each, _ in wire.frame_messages(pb.FetchReply, [memoryview(payload)], 0, 1):
                await asyncio.sleep(10)
                await self._send(each)
        await self._send(message)


@pytest.mark.parametrize(("joins", "most"), [(True, 1), (False, 1), (True, 2)])
async def test_donors_that_say_next_to_nothing_are_set_aside(joins, most):
    """And another gives its state. They live, and answer all else. Not even two take turns."""
    slow: list[str] = []
    async with Swarm(steady(100_000), "abc" if joins else "abcd", at=2) as swarm:
        for peer in swarm.alive:
            at = peer.node.server.streams
            serve = at["Data/Fetch"]
            at["Data/Fetch"] = lambda s, f=serve, n=peer.name: f(Slow(s, n, slow, most))
        if joins:
            await swarm.join("d", via="abc", wait_s=600.0)
        else:
            swarm.freeze("d")
            await swarm.sleep(20)
            swarm.thaw("d")
        await swarm.until(lambda: bool(swarm["d"].of_kind("adopted")), 20 + 40 * most)
        assert not joins or swarm["a"].versions > (14 * most,), "nobody waits for one that fetches"
        told = "fetching from {}: the donor has sent nothing for 38 s"
        assert swarm["d"].warnings == [*map(told.format, slow[:most])]
        assert swarm["d"].of_kind("adopted")[0]["donor"] == slow[most]
