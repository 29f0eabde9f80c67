"""This peer's routes: those searched for what was measured last, and what goes on meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import pytest

from algorithms.codecs import codec_by_name
from algorithms.skippipe.search import search_routes
from tests.unit.worker.pipeline.members import cards_of, telling
from worker.membership import Member
from worker.pipeline.config import StagesConfig
from worker.pipeline.context import StageContext
from worker.pipeline.network_snapshot import table_name, table_of
from worker.pipeline.planner import RoutePlanner, planned_rules
from worker.pipeline.profile import Profile
from worker.transport.memory import MemoryNetwork, MemoryTransport

T = TypeVar("T")

CONFIG = StagesConfig(count=3, routing="skip", skip=0.0, microbatches=2)


class Searches:
    """Stands for the thread that searches: each waits until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self._go = asyncio.Event()

    async def __call__(self, work: Callable[[], T], /) -> T:
        self.begun += 1
        await self._go.wait()
        return work()

    async def let_go(self) -> None:
        self._go.set()
        for _ in range(5):
            await asyncio.sleep(0)
        self._go.clear()


class Peer:
    """An origin that hears of `members`."""

    def __init__(self, members: list[Member], name: str = "p0") -> None:
        self.members, self.searches = members, Searches()
        self.events: list[dict[str, object]] = []
        self.now = 0.0
        self.context = StageContext(
            me=name,
            run=1,
            seed=3,
            stage=0,
            config=CONFIG,
            codec=codec_by_name("fp32"),
            transport=MemoryTransport(MemoryNetwork(), name),
            members=lambda: self.members,
            doubt=lambda peer: None,
            clock=lambda: self.now,
            log=self.events.append,
        )
        self.schedule = RoutePlanner(self.context, self.searches)


def measured(seconds: float) -> list[Member]:
    """Two replicas of each of three stages; p4 has taken so long."""
    members = cards_of(0, 0, 1, 1, 2, 2)
    return [*members[:4], telling(members[4], Profile(forward_s=seconds)), members[5]]


def crossed(*, near: str, far: str) -> list[Member]:
    """Two replicas of each of three stages; p0 is near one of stage 1, and far from the other."""
    members = cards_of(0, 0, 1, 1, 2, 2)
    return [telling(members[0], Profile(latency_s={near: 0.001, far: 2.0})), *members[1:]]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def on_plan(peer: Peer, iteration: int) -> bool:
    """Whether the peer's routes are those that a search finds for what it knows."""
    routes, table = peer.schedule.routes(iteration)[0], table_of(peer.members)
    assert table is not None
    found = search_routes(
        table.pipeline,
        planned_rules(CONFIG, table, iteration),
        [0, 1, 0, 1],
        seed=peer.context.seed - 1,
        effort_s=0.5,
        shared_uplinks=True,
    )
    me = table.peers.index(peer.context.me)
    expected = [r.peers[1:] for r in found.routes if r.origin == me]
    return [tuple(table.peers.index(hop.peer) for hop in route) for route in routes] == expected


def test_who_is_still_searching_names_the_same_measurements_as_who_has_found() -> None:
    """Two origins with the same cards; the search of one is over."""

    async def scenario() -> None:
        members = measured(0.1)
        first, second = Peer(members, "p0"), Peer(members, "p1")
        name = table_name(members)
        assert first.schedule.routes(1)[1] == second.schedule.routes(1)[1] == name
        await first.searches.let_go()
        assert on_plan(first, 2)
        assert first.schedule.routes(2)[1] == second.schedule.routes(2)[1] == name
        await second.searches.let_go()
        assert on_plan(second, 3)
        assert (first.searches.begun, second.searches.begun) == (1, 1)
        await first.schedule.close()

    run(scenario())


def test_who_has_heard_other_measurements_names_them() -> None:
    async def scenario() -> None:
        first, second = Peer(measured(0.1), "p0"), Peer(measured(0.3), "p1")
        assert first.schedule.routes(1)[1] != second.schedule.routes(1)[1]
        second.members = first.members
        assert first.schedule.routes(2)[1] == second.schedule.routes(2)[1] == first.schedule.name
        await first.schedule.close()
        await second.schedule.close()

    run(scenario())


def test_tables_that_were_held_are_known_for_a_while_and_then_no_longer() -> None:
    peer = Peer(measured(0.1))
    names = {seconds: table_name(measured(seconds)) for seconds in (0.1, 0.2, 0.3)}

    def known() -> set[float]:
        return {seconds for seconds, name in names.items() if peer.schedule.knows(name)}

    assert known() == {0.1}
    peer.now = 100.0  # however long it was held
    peer.members = measured(0.2)
    assert known() == {0.1, 0.2}
    peer.now = 109.0
    peer.members = measured(0.3)
    assert known() == {0.1, 0.2, 0.3}
    peer.now = 112.0
    assert known() == {0.2, 0.3}
    peer.members = measured(0.1)  # again
    assert known() == {0.1, 0.2, 0.3}
    peer.now = 130.0
    assert known() == {0.1}


def test_what_was_held_between_two_visits_is_known() -> None:
    peer, between = Peer(measured(0.1)), table_name(measured(0.2))
    for seconds in (0.1, 0.2, 0.3):
        peer.members = measured(seconds)
        peer.schedule.look()
    assert peer.schedule.knows(between)


def test_the_tables_that_are_known_are_bounded() -> None:
    peer = Peer([])
    names = []
    for n in range(1, 400):
        peer.members = measured(float(n))
        names.append(peer.schedule.name)
    known = [peer.schedule.knows(name) for name in names]
    assert sum(known) == 257  # with the one that is held
    assert known == sorted(known)  # the oldest are forgotten


def test_origins_whose_searches_are_over_are_on_the_routes_of_one_plan() -> None:
    async def scenario() -> None:
        members = measured(0.1)
        peers = [Peer(members, "p0"), Peer(members, "p1")]
        taken = []
        for peer in peers:
            peer.schedule.routes(1)
            await peer.searches.let_go()
            taken += [[hop.peer for hop in route] for route in peer.schedule.routes(2)[0]]
        table = table_of(members)
        assert table is not None
        found = search_routes(
            table.pipeline,
            planned_rules(CONFIG, table, 1),
            [0, 1, 0, 1],
            seed=peers[0].context.seed - 1,
            effort_s=0.5,
            shared_uplinks=True,
        )
        by_origin = sorted(found.routes, key=lambda route: route.origin)
        assert taken == [[table.peers[peer] for peer in route.peers[1:]] for route in by_origin]

    run(scenario())


def test_routes_found_before_go_on_until_there_are_new_ones() -> None:
    async def scenario() -> None:
        peer = Peer(crossed(near="p2", far="p3"))
        peer.schedule.routes(1)
        await peer.searches.let_go()
        routes, name = peer.schedule.routes(2)
        peer.members = crossed(near="p3", far="p2")
        assert peer.schedule.routes(3) == (routes, peer.schedule.name)
        assert name != peer.schedule.name
        assert not on_plan(peer, 3)
        await peer.searches.let_go()
        assert on_plan(peer, 4)
        await peer.schedule.close()

    run(scenario())


def test_routes_found_before_end_when_a_peer_has_moved() -> None:
    """The same peers and stages, but p3 has gone from stage 1 to stage 2, and refuses its hops."""

    async def scenario() -> None:
        peer = Peer(measured(0.1))
        peer.schedule.routes(1)
        await peer.searches.let_go()
        peer.members = [*peer.members[:3], replace(peer.members[3], stage=2), *peer.members[4:]]
        routes, name = peer.schedule.routes(2)
        assert name == peer.schedule.name
        stage_of = {member.peer: member.stage for member in peer.members}
        assert all(stage_of[hop.peer] == hop.stage for route in routes for hop in route)
        await peer.schedule.close()

    run(scenario())


def test_a_search_that_fails_is_told_once_and_drawn_routes_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such luck")

    async def scenario() -> None:
        peer = Peer(measured(0.1))
        with monkeypatch.context() as patched:
            patched.setattr("worker.pipeline.planner.search_routes", broken)
            for iteration in range(1, 5):
                routes, name = peer.schedule.routes(iteration)
                assert (len(routes), name) == (2, peer.schedule.name)
                await peer.searches.let_go()
        text = "no routes were searched: ValueError: no such luck"
        assert peer.events == [{"event": "warning", "text": text}]
        assert peer.searches.begun == 1
        peer.members = measured(0.3)  # other measurements are searched for again
        peer.schedule.routes(5)
        await peer.searches.let_go()
        assert on_plan(peer, 6)
        await peer.schedule.close()

    run(scenario())


def test_who_does_not_serve_sends_nothing() -> None:
    async def scenario() -> None:
        members = measured(0.1)
        assert Peer(members, "p9").schedule.routes(1) == ([(), ()], table_name(members))
        assert Peer(cards_of(1, 2), "p0").schedule.routes(1)[0] == [(), ()]

    run(scenario())


@pytest.mark.parametrize(
    ("count", "skip", "spread"),
    [
        *((2, skip, 0) for skip in (0.0, 0.25)),
        *((count, skip, 0) for count, skip in product((4, 6, 9), (0.0, 0.25, 0.5))),
        *((4, 0.25, 1), (6, 0.33, 1), (9, 0.33, 2)),
    ],
)
def test_rules_can_be_kept_whatever_stages_are_left(count: int, skip: float, spread: int) -> None:
    config = StagesConfig(count=count, routing="random", skip=skip, spread=spread)
    whole = config.rules(1)
    for left in range(1, count + 1):
        table = table_of(cards_of(*range(left)))
        assert table is not None
        rules = planned_rules(config, table, 1)
        assert rules.stages == left
        assert (rules.visited > 1) == (left > 1)
        assert rules.stages - rules.visited <= whole.stages - whole.visited
        assert rules.spread <= whole.spread
        assert left < count or rules == whole
