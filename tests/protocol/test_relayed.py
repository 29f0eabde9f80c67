"""A peer that can only dial out is a member through its relays, and they may die."""

from collections.abc import Callable

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import split_relayed
from murmuration.worker.identity.authority import Authority
from murmuration.worker.relay import choice, router_port
from murmuration.worker.relay.router_port import UpnpRouter
from murmuration.worker.relay.tunnels import message, received
from murmuration.worker.transport import Method, Stream
from tests.protocol.problem import steady
from tests.protocol.swarm import Peer, Swarm, T
from tests.support.memory_transport import MemoryNetwork


def relays_of(peer: Peer) -> list[object]:
    """Names, as it has said it last."""
    said = peer.of_kind("relayed")
    by = said[-1]["by"] if said else []
    assert isinstance(by, list)
    return sorted(by)


async def joins_by_relays(swarm: Swarm, name: str, count: int) -> None:
    """A peer that nobody can dial."""
    swarm.network.close_port(name)
    await swarm.join(name, via="a", min_peers=2)
    await swarm.until(lambda: len(relays_of(swarm[name])) == count, 30)


class HomeRouter(UpnpRouter):
    """Opens ports of the modelled network. Args: leads: whether what it opens leads anywhere."""

    def __init__(self, network: MemoryNetwork, leads: bool) -> None:
        self._network, self._leads = network, leads
        self.opened: list[str] = []
        self.asked_aside = 0

    async def offload(self, work: Callable[[], T], /) -> T:
        self.asked_aside += 1  # rounds go on meanwhile
        return work()

    def open(self, bound: str, before: str) -> str:
        self.opened.append(bound)
        if self._leads:
            self._network.open_port(bound)
        return bound

    def close(self, address: str) -> None:
        self.opened.clear()


@pytest.mark.parametrize("leads", [True, False], ids=["open", "in-vain"])
async def test_a_port_of_the_router_comes_before_relays(leads, monkeypatch):
    monkeypatch.setattr(router_port, "_AGAIN_S", 15.0)
    async with Swarm(steady(80)) as swarm:
        swarm.router = router = HomeRouter(swarm.network, leads)
        await swarm.start(*"ab")
        swarm.network.close_port("d")
        await swarm.join("d", via="a", min_peers=2)
        await swarm.until(lambda: swarm["d"].versions >= (2,), 30)
        assert router.asked_aside
        assert relays_of(swarm["d"]) == ([] if leads else ["a", "b"])
        if leads:  # a router that was restarted has forgotten the port
            swarm.network.close_port("d")
        await swarm.sleep(20)
        assert bool(router.opened) == leads  # what leads nowhere was given back
        assert swarm["a"].node.gossip.me.unreachable == ()
        await swarm.finished()
        assert len(swarm["d"].of_kind("router_port")) == 1
    assert not router.opened


async def test_two_that_nobody_can_dial_reach_each_other():
    """Calls to one are refused, those to the other are lost."""
    async with Swarm(steady(50), "ab") as swarm:
        await swarm.sleep(2)
        for name in "cd":
            swarm.network.close_port(name, silent=name == "d")
            await swarm.join(name, via="a", min_peers=2)
        await swarm.ends_equal(versions=(10,))
        for name in "cd":
            assert relays_of(swarm[name]) == ["a", "b"]
            assert swarm[name].of_kind("unreachable") == []
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            assert peer.of_kind("round")[-1]["contributors"] == 4


async def test_a_relay_that_dies_is_replaced_amid_rounds(tmp_path):
    async with Swarm(steady(60), "abc", authority=Authority.make(tmp_path)) as swarm:
        await joins_by_relays(swarm, "d", 2)
        (victim, *_) = relays_of(swarm["d"])
        swarm.kill(str(victim))
        left = sorted({"a", "b", "c"} - {victim})
        await swarm.until(lambda: relays_of(swarm["d"]) == left, 10)
        version = swarm["d"].versions[0]
        await swarm.until(lambda: swarm["d"].versions >= (version + 2,), 30)
        await swarm.ends_equal(versions=(12,))
        assert swarm["d"].of_kind("round")[-1]["contributors"] == 3


async def test_a_second_relay_is_found_once_it_can_be_reached():
    async with Swarm(steady(200), "ab") as swarm:
        swarm.network.cut("b", "d")
        await joins_by_relays(swarm, "d", 1)
        swarm.network.heal("b", "d")
        await swarm.until(lambda: relays_of(swarm["d"]) == ["a", "b"], 60)


async def test_a_relayed_peer_says_so_of_itself_and_relays_for_nobody():
    async with Swarm(steady(300), "a") as swarm:
        await joins_by_relays(swarm, "c", 1)
        await joins_by_relays(swarm, "d", 1)
        await swarm.sleep(5)
        assert relays_of(swarm["d"]) == ["a"]
        address = swarm["a"].node.gossip.address_of("d")
        assert address is not None
        assert split_relayed(address) == ("d", ("a",))


async def test_a_relay_that_refuses_dials_is_replaced_though_it_keeps_the_reservation(monkeypatch):
    monkeypatch.setattr(choice, "TRY_S", 4.0)
    async with Swarm(steady(10**6), "abc") as swarm:
        await joins_by_relays(swarm, "d", 2)
        first, second = map(str, relays_of(swarm["d"]))
        (third,) = {"a", "b", "c"} - {first, second}
        swarm.network.refuse_dials.add(first)
        await swarm.until(lambda: relays_of(swarm["d"]) == sorted((second, third)), 120)


@pytest.mark.parametrize("address", ["a", "b;a", "b@a"])
async def test_a_relay_cannot_take_over_the_reservation_of_another(address):
    async def lies(stream: Stream) -> None:
        await received(stream, 10)
        await stream.send(message(opened=pb.RelayOpened(peer="b", address=address)))
        await received(stream, 10)

    async with Swarm(steady(10**6), "ab") as swarm:
        swarm["b"].node.server.streams[Method.RESERVE] = lies
        await joins_by_relays(swarm, "d", 1)
        await swarm.sleep(20)  # it tries after 1, 3, 7 and 15 s
        assert [said["by"] for said in swarm["d"].of_kind("relayed")] == [["a"]]
        told = swarm["d"].warnings
        assert any(f"b at {address}, which is another" in text for text in told)
        assert not any("no relay is left" in text for text in told)
