"""Links that are cut between peers in pairs, and heal: rounds go around them."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from tests.protocol import swarm as swarms
from tests.protocol.pair_runs import NOLOCO, SLOW, failures_of, in_round, rounds_of, steady
from tests.protocol.pair_taps import GossipMessage, first, meetings
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run


@pytest.fixture(autouse=True)
def brief_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without consensus peers never agree: there is nothing to stay for in the end."""
    monkeypatch.setattr(swarms, "SETTLE_S", 5.0)


def contributors_of(peer: Peer) -> dict[object, object]:
    return {event["round"]: event["contributors"] for event in peer.of_kind("round")}


THREES = replace(SLOW, group_size=3)
ROUNDS = 10


@pytest.mark.parametrize(
    ("plan", "peers"),
    [
        (SLOW, "abcd"),
        (NOLOCO, "abcde"),
        (NOLOCO, "abcdefgh"),
        (THREES, "abcd"),
        (THREES, "abcdefgh"),
    ],
)
def test_a_link_cut_for_good_costs_the_pair_one_round(plan: Plan, peers: str) -> None:
    """From then on each meets others: nobody waits, and nobody sits out who would not anyway."""

    async def scenario() -> None:
        async with Swarm(steady(ROUNDS * plan.inner_steps, plan)) as swarm:
            pair: list[str] = []

            def cut(said: GossipMessage) -> None:
                pair.extend((said.speaker, said.listener))
                swarm.cut(*pair)

            swarm.tap = first(in_round(swarm, 1, "contribution frame"), cut)
            await swarm.start(*peers)
            await swarm.finished()
            one, other = (swarm[name] for name in pair)
            assert failures_of(one)[0] == failures_of(other)[0] == 1
            assert [event["peers"] for event in one.of_kind("unreachable")] == [[other.name]]
            for round_ in range(2, ROUNDS):
                sat_out = [p.name for p in swarm.alive if contributors_of(p)[round_] == 1]
                assert len(sat_out) == len(peers) % plan.group_size
            for peer in swarm.alive:
                with_both = peer is one or peer is other or failures_of(peer) != []
                assert failures_of(peer) == ([1] if with_both else [])
                assert rounds_of(peer) == [r for r in range(ROUNDS) if r != 1 or not with_both]
            assert sum(failures_of(peer) != [] for peer in swarm.alive) == plan.group_size

    run(scenario())


def cuts_known_to(peer: Peer) -> dict[object, object]:
    """As `murmur status` shows them: whom each member does not reach, of those that name any."""
    return {m["peer"]: m["unreachable"] for m in peer.members if "unreachable" in m}


def test_a_link_that_heals_is_used_again() -> None:
    async def scenario() -> None:
        async with Swarm(steady(400, SLOW)) as swarm:
            await swarm.start(*"abcd")
            swarm.cut("a", "b")
            await swarm.until(lambda: cuts_known_to(swarm["c"]) == {"a": ["b"], "b": ["a"]}, 20)
            await swarm.sleep(60)
            swarm.heal("a", "b")
            told: list[GossipMessage] = []
            swarm.tap = meetings(told.append)
            await swarm.finished()
            assert [event["peers"] for event in swarm["b"].of_kind("unreachable")] == [["a"], []]
            assert ("a", "b") in {(said.speaker, said.listener) for said in told}
            assert all(failures_of(peer) == [] for peer in swarm.alive)

    run(scenario())
