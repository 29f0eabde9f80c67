"""Nobody waits for a peer that none can dial: as it joins, and when its port closes later."""

import asyncio

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack
from murmuration.worker.errors import NotDialled
from murmuration.worker.leases import SampleStream
from murmuration.worker.transport import Caller
from tests.protocol.drawn import DrawingSwarm
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.memory_transport import MemoryTransport

NOWHERE = "nowhere:7700"


def test_a_joiner_with_a_wrong_address_is_refused_and_slows_nobody():
    async def undisturbed() -> float:
        async with Swarm(steady(30), "abc") as swarm:
            await swarm.finished()
            return swarm.loop.time()

    async def scenario() -> float:
        async with Swarm(steady(30), "abc") as swarm:
            await swarm.sleep(2.6)
            stranger = await swarm.join("d", via="a", min_peers=2, advertise=NOWHERE, relayed=False)
            with pytest.raises(NotDialled, match=r"--advertise HOST:PORT") as refused:
                await swarm.until(lambda: stranger.done, 10)
            assert f"a does not reach d at {NOWHERE}, which it advertises" in str(refused.value)
            swarm.peers.pop("d")
            await swarm.ends_equal(versions=(6,))
            for peer in swarm.alive:
                assert [m["peer"] for m in peer.members] == ["a", "b", "c"]
                assert {event["contributors"] for event in peer.of_kind("round")} == {3}
            return swarm.loop.time()

    assert run(scenario()) == pytest.approx(run(undisturbed()), abs=0.5)


async def test_addresses_that_are_dialled_back_keep_no_connection():
    """Nor does one that a member has had: somebody names as many as it likes."""
    async with Swarm(steady(60), "ab") as swarm:
        await swarm.join("c", via="a")
        await swarm.sleep(2)
        node, manifest = swarm["a"].node, swarm.problem.manifest
        packed, member = manifest.pack(), pb.Member(peer="d", address="d", start_ms=1)
        turned = {**manifest.document["advice"], "tensors": {"order": "1"}}
        document = pack({**manifest.document, "advice": turned})
        join = pb.JoinRequest(member=member, manifest=document).SerializeToString()
        answer = pb.JoinReply.FromString(await node.server.on_call("Control/Join", join))
        assert "tensors: in another order" in answer.refusal
        for number in range(50):  # strangers, who write what they like
            join = pb.JoinRequest(member=pb.Member(peer=f"{number}\33[2J"), manifest=document)
            await node.server.on_call("Control/Join", join.SerializeToString())
        told = [text for text in swarm["a"].warnings if "was not let in: the manifests" in text]
        assert len(told) == 32
        assert all(text.isprintable() for text in told)
        for number in range(50):
            member = pb.Member(peer="d", address=f"d{number}", start_ms=1 + number)
            join = pb.JoinRequest(member=member, manifest=packed)
            await node.server.on_call("Control/Join", join.SerializeToString())
            await swarm.sleep(0.1)
            assert len(swarm["a"].transport.open_to) <= 4
        swarm.kill("c")
        await swarm.sleep(0.1)
        await swarm.restart("c", via="a")
        await swarm.until(lambda: swarm["a"].transport.open_to == {"b", "c'"}, 30)


async def test_addresses_of_one_caller_that_answer_nobody_delay_no_other():
    mallory = Caller("ipv4:127.0.0.1:1", "peer", "mallory")
    async with Swarm(steady(60), "ab") as swarm:
        await swarm.sleep(2)
        swarm.network.close_port("b", silent=True)
        node, packed = swarm["a"].node, swarm.problem.manifest.pack()
        member = pb.Member(peer="x", address="b", start_ms=1)
        join = pb.JoinRequest(member=member, manifest=packed, dial_only=True)
        request = join.SerializeToString()
        asked = [
            asyncio.create_task(node.server.on_call("Control/Join", request, mallory))
            for _ in range(32)
        ]
        await swarm.sleep(0.1)
        await swarm.join("d", via="a")
        await swarm.until(lambda: "d" in swarm["a"].node.gossip.view.members, 4)
        for each in asked:
            each.cancel()


async def test_a_second_peer_dials_back_too():
    """The one that is asked may be the only one that reaches the newcomer."""
    async with Swarm(steady(30), "ab") as swarm:
        await swarm.sleep(2)
        swarm.network.cut("b", "d")
        stranger = await swarm.join("d", via="a", min_peers=2, relayed=False)
        with pytest.raises(NotDialled, match="b does not reach d at d"):
            await swarm.until(lambda: stranger.done, 10)
        swarm.peers.pop("d")
        await swarm.ends_equal(versions=(6,))


async def test_a_newcomer_that_most_reach_is_taken_in_at_another_try():
    async with Swarm(Problem(steps=60), "abc") as swarm:
        await swarm.sleep(2)
        swarm.network.cut("b", "d")
        await swarm.join("d", via="a")
        await swarm.until(lambda: swarm["d"].versions > (2,), 30)
        assert swarm["d"].of_kind("adopted")


@pytest.mark.parametrize(("names", "silent"), [("ab", True), ("abcd", False)])
async def test_a_peer_with_a_closed_port_is_out_of_rounds(names, silent):
    """It goes on calling the others, so that nobody takes it for dead."""
    async with Swarm(steady(60)) as swarm:
        *others, shut = names
        await swarm.start(*names)
        await swarm.until(lambda: swarm["a"].versions >= (2,), 30)
        swarm.network.close_port(shut, silent=silent)
        detected_s = swarm.problem.config.membership.detection_s(len(names))
        limit_s = 5 * 0.5 + detected_s + 1.0  # a round, and the time in which it is noticed
        for version in range(3, 6):

            def all_have(version: int = version) -> bool:
                return all(swarm[name].versions >= (version,) for name in others)

            await swarm.until(all_have, limit_s)
            limit_s = 5 * 0.5 + 1.0
        assert swarm[others[0]].of_kind("unreachable")[-1]["peers"] == [shut]
        swarm.network.open_port(shut)
        await swarm.ends_equal(versions=(12,))
        for name in others:
            assert swarm[name].of_kind("round_failed") == []
            assert swarm[name].of_kind("unreachable")[-1]["peers"] == []
            assert swarm[name].of_kind("round")[-1]["contributors"] == len(names)


async def test_calls_name_the_peer_that_they_mean(monkeypatch):
    """So that another, which has the address by now, cannot answer in its place. The first contact
    with an address that the user has typed may find anybody of the run."""
    unnamed: list[tuple[str, str]] = []
    methods: set[str] = set()
    call = MemoryTransport.call

    async def told(
        self: MemoryTransport,
        address: str,
        method: str,
        request: bytes,
        timeout_s: float,
        peer: str | None = None,
    ) -> bytes:
        dials = method == "Control/Join" and pb.JoinRequest.FromString(request).dial_only
        methods.add("a second dial" if dials else method)
        if peer is None and (dials or method != "Control/Join"):
            unnamed.append((method, address))
        assert peer is None or address.rstrip("'") == peer
        return await call(self, address, method, request, timeout_s, peer)

    monkeypatch.setattr(MemoryTransport, "call", told)
    stream = SampleStream(id=1, block=20, length=990)
    async with DrawingSwarm(steady(40), stream, "abc") as swarm:
        await swarm.sleep(2)
        swarm.network.cut("a", "b")
        await swarm.join("d", via="a")
        await swarm.finished()
    assert unnamed == []
    assert {"Control/Lease", "Control/IndirectProbe", "a second dial"} <= methods
