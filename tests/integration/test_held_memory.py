"""The memory of a worker that a member's streams can hold, if nobody reads or ends them."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.node.answers import STREAMS_EACH, most_streams
from murmuration.worker.transport import WINDOW_BYTES
from murmuration.worker.transport.served import MOST_CALLS
from tests.support.held_streams import Held, hold_streams, released
from tests.support.members import certified_swarm, resident_mib
from tests.support.stranger import calling
from tests.support.workers import ENDLESS, PATIENCE_S, QUICK, Swarm

Attacked = tuple[Swarm, list[Identity]]
MOST_BYTES = 256 * 1024 * 1024
MIB = 1024 * 1024
FRAME = pb.ExchangeUp(frame=pb.Frame(payload=bytes(MIB))).SerializeToString()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Two workers that train, and five members' certificates."""
    members, out = [f"mallory{n}" for n in range(5)], tmp_path_factory.mktemp("held")
    with certified_swarm(2, out, *ENDLESS, *QUICK, members=members) as (swarm, identities):
        swarm.start_all()
        swarm.workers["w1"].wait_for_round(2)
        yield swarm, identities


def held_by(attacked: Attacked, *, members: int) -> Held:
    """Each of so many members opens 400 streams, all filled as far as they go; rounds go on.

    Fails when the worker goes on holding more than it may for all of them together."""
    swarm, identities = attacked

    async def scenario() -> Held:
        before = resident_mib(swarm)
        at, method = swarm.addresses["w0"], "Data/Exchange"
        said = [(each, [header(swarm, each), FRAME]) for each in identities[:members]]
        found = await asyncio.gather(
            *(hold_streams(at, m, method, s, count=400, left=STREAMS_EACH) for m, s in said)
        )
        worker, rounds, deadline = swarm.workers["w0"], 0, time.monotonic() + PATIENCE_S
        while (more := resident_mib(swarm) - before) >= MOST_BYTES / MIB or rounds < 3:
            assert time.monotonic() < deadline, f"{more} MiB are held, rounds go on"
            worker.wait_for(lambda event: event["event"] == "round", "a round")
            rounds += 1
        for _, tasks in found:
            await released(tasks)
        return Held(
            sum(held.open for held, _ in found),
            [refusal for held, _ in found for refusal in held.refusals],
        )

    return asyncio.run(scenario())


def header(swarm: Swarm, identity: Identity) -> bytes:
    """The header of a contribution to a far round: it is held, its frames are not read."""
    with calling(swarm.addresses["w0"], identity) as stranger:
        run = stranger.manifest().run
    far = pb.ContributionHeader(run=run, sender=identity.name, round=10**9)
    return pb.ExchangeUp(header=far).SerializeToString()


def test_400_unread_streams_of_a_member_hold_little(attacked):
    """Before, 40 of them held 10 GB."""
    held = held_by(attacked, members=1)
    assert held.open <= STREAMS_EACH
    busy = [said for said in held.refusals if said.startswith("RESOURCE_EXHAUSTED")]
    assert len(busy) > STREAMS_EACH  # on a busy machine a few handshakes are not over in time
    assert all("mallory0 has 32 streams here" in said for said in busy)


def test_five_such_members_together_hold_no_more_than_is_said(attacked):
    """The total is the one in docs/evidence/reliability.md."""
    streams = most_streams(2)
    assert (streams + MOST_CALLS) * (WINDOW_BYTES + MIB) <= MOST_BYTES
    held = held_by(attacked, members=5)
    assert held.open <= streams
    assert any("of at most 128 streams are under way" in said for said in held.refusals)


def test_calls_that_ask_nothing_are_limited_and_end(attacked):
    swarm, (mallory, *_) = attacked

    async def scenario() -> Held:
        held, tasks = await hold_streams(
            swarm.addresses["w0"], mallory, "Control/Gossip", [], count=60, left=0, connections=4
        )
        await released(tasks)
        return held

    held = asyncio.run(scenario())
    assert len(held.refusals) == 60
    assert sum("has 8 calls here" in said for said in held.refusals) == 52
    assert sum("no request in 10 s" in said for said in held.refusals) == 8
