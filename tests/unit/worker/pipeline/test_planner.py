"""From gossiped profiles to this peer's routes: the same wherever the same was heard."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import pytest

from murmuration.algorithms.skippipe.search import search_routes
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.planner import (
    RoutePlanner,
    links_of,
    planned_rules,
    snapshot_name,
    snapshot_of,
)
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stages_config import StagesConfig
from tests.unit.worker.pipeline.members import context_of, members_of, telling


def test_a_snapshot_numbers_those_that_serve_by_stage() -> None:
    snapshot = snapshot_of(members_of(0, 2, 0, 1))
    assert snapshot is not None
    assert snapshot.peers == ("p0", "p1", "p2", "p3")
    assert snapshot.stages == (0, 1, 2)
    assert snapshot.pipeline.stages == ((0, 2), (3,), (1,))


def test_a_stage_that_nobody_serves_is_left_out_and_without_origins_there_is_no_snapshot() -> None:
    snapshot = snapshot_of(members_of(0, 3))
    assert snapshot is not None
    assert snapshot.stages == (0, 3)
    assert snapshot_of(members_of(1, 2)) is None
    assert snapshot_of([]) is None


def test_a_snapshot_is_named_by_who_serves_and_what_was_measured() -> None:
    members = members_of(0, 1, 1)
    name = snapshot_name(members)
    assert snapshot_name(list(reversed(members))) == name
    others = [
        telling(members[2], Profile(forward_s=1.0)),
        replace(members[2], epoch=2),
        replace(members[2], stage=0),
        replace(members[2], health=Health.SUSPECT),
        replace(members[2], phase=Phase.DONE),
    ]
    names = [snapshot_name([*members[:2], other]) for other in others]
    assert name not in names
    assert snapshot_name([*members[:2], replace(members[2], step=9, heartbeat=4)]) == name


def test_what_nobody_has_measured_is_as_what_was() -> None:
    members = members_of(0, 1, 1)
    members[1] = telling(members[1], Profile(forward_s=0.5, backward_s=1.5, memory=9))
    snapshot = snapshot_of(members)
    assert snapshot is not None
    assert snapshot.pipeline.costs.forward_s.tolist() == [0.5, 0.5, 0.5]
    assert snapshot.pipeline.costs.backward_s.tolist() == [1.5, 1.5, 1.5]
    assert snapshot.pipeline.memory == (9, 9, 9)


def test_a_links_latency_is_the_shorter_that_was_told_and_its_rate_the_senders() -> None:
    mine = Profile(latency_s={"b": 0.03}, rate_bytes_per_s={"b": 1e6})
    theirs = Profile(latency_s={"a": 0.01}, rate_bytes_per_s={"a": 5e6})
    links = links_of(["a", "b"], [mine, theirs])
    assert links.latency_s[0, 1] == links.latency_s[1, 0] == 0.01
    assert links.rate_bytes_per_s[0, 1] == 1e6
    assert links.rate_bytes_per_s[1, 0] == 5e6


def test_the_median_of_what_is_known_stands_for_a_link_that_nobody_has_measured() -> None:
    near = Profile(latency_s={"b": 0.03, "c": 0.01}, rate_bytes_per_s={"b": 1e6, "c": 3e6})
    links = links_of(["a", "b", "c"], [near, Profile(), Profile()])
    assert links.latency_s[1, 2] == links.latency_s[2, 1] == pytest.approx(0.02)
    assert links.rate_bytes_per_s[1, 0] == links.rate_bytes_per_s[1, 2] == 2e6


# ------------------------------------------------------------------------------------- routes


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
        self.context = context_of(
            name,
            lambda: self.members,
            config=CONFIG,
            offload=self.searches,
            clock=lambda: self.now,
            log=self.events.append,
        )
        self.planner = RoutePlanner(self.context)


def measured(seconds: float) -> list[Member]:
    """Two replicas of each of three stages; p4 has taken so long."""
    members = members_of(0, 0, 1, 1, 2, 2)
    return [*members[:4], telling(members[4], Profile(forward_s=seconds)), members[5]]


def crossed(*, near: str, far: str) -> list[Member]:
    """Two replicas of each of three stages; p0 is near one of stage 1, and far from the other."""
    members = members_of(0, 0, 1, 1, 2, 2)
    return [telling(members[0], Profile(latency_s={near: 0.001, far: 2.0})), *members[1:]]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def on_plan(peer: Peer, iteration: int) -> bool:
    """Whether the peer's routes are those that a search finds for what it knows."""
    routes, snapshot = peer.planner.routes(iteration)[0], snapshot_of(peer.members)
    assert snapshot is not None
    found = search_routes(
        snapshot.pipeline,
        planned_rules(CONFIG, snapshot, iteration),
        [0, 1, 0, 1],
        seed=peer.context.seed - 1,
        effort_s=0.5,
        shared_uplinks=True,
    )
    me = snapshot.peers.index(peer.context.me)
    expected = [r.peers[1:] for r in found.routes if r.origin == me]
    return [tuple(snapshot.peers.index(hop.peer) for hop in route) for route in routes] == expected


def test_who_is_still_searching_names_the_same_measurements_as_who_has_found() -> None:
    """Two origins with the same cards; the search of one is over."""

    async def scenario() -> None:
        members = measured(0.1)
        first, second = Peer(members, "p0"), Peer(members, "p1")
        name = snapshot_name(members)
        assert first.planner.routes(1)[1] == second.planner.routes(1)[1] == name
        await first.searches.let_go()
        assert on_plan(first, 2)
        assert first.planner.routes(2)[1] == second.planner.routes(2)[1] == name
        await second.searches.let_go()
        assert on_plan(second, 3)
        assert (first.searches.begun, second.searches.begun) == (1, 1)
        await first.planner.close()

    run(scenario())


def test_who_has_heard_other_measurements_names_them() -> None:
    async def scenario() -> None:
        first, second = Peer(measured(0.1), "p0"), Peer(measured(0.3), "p1")
        assert first.planner.routes(1)[1] != second.planner.routes(1)[1]
        second.members = first.members
        assert first.planner.routes(2)[1] == second.planner.routes(2)[1] == first.planner.name
        await first.planner.close()
        await second.planner.close()

    run(scenario())


def test_snapshots_that_were_held_are_known_for_a_while_and_then_no_longer() -> None:
    peer = Peer(measured(0.1))
    names = {seconds: snapshot_name(measured(seconds)) for seconds in (0.1, 0.2, 0.3)}

    def known() -> set[float]:
        return {seconds for seconds, name in names.items() if peer.planner.knows(name)}

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


def test_what_was_held_between_two_calls_is_known() -> None:
    peer, between = Peer(measured(0.1)), snapshot_name(measured(0.2))
    for seconds in (0.1, 0.2, 0.3):
        peer.members = measured(seconds)
        peer.planner.on_view()
    assert peer.planner.knows(between)


def test_the_snapshots_that_are_known_are_bounded() -> None:
    peer = Peer([])
    names = []
    for n in range(1, 400):
        peer.members = measured(float(n))
        names.append(peer.planner.name)
    known = [peer.planner.knows(name) for name in names]
    assert sum(known) == 257  # with the one that is held
    assert known == sorted(known)  # the oldest are forgotten


def test_routes_found_before_go_on_until_there_are_new_ones() -> None:
    async def scenario() -> None:
        peer = Peer(crossed(near="p2", far="p3"))
        peer.planner.routes(1)
        await peer.searches.let_go()
        routes, name = peer.planner.routes(2)
        peer.members = crossed(near="p3", far="p2")
        assert peer.planner.routes(3) == (routes, peer.planner.name)
        assert name != peer.planner.name
        assert not on_plan(peer, 3)
        await peer.searches.let_go()
        assert on_plan(peer, 4)
        await peer.planner.close()

    run(scenario())


def test_routes_found_before_end_when_a_peer_has_moved() -> None:
    """The same peers and stages, but p3 has gone from stage 1 to stage 2, and refuses its hops."""

    async def scenario() -> None:
        peer = Peer(measured(0.1))
        peer.planner.routes(1)
        await peer.searches.let_go()
        peer.members = [*peer.members[:3], replace(peer.members[3], stage=2), *peer.members[4:]]
        routes, name = peer.planner.routes(2)
        assert name == peer.planner.name
        stage_of = {member.peer: member.stage for member in peer.members}
        assert all(stage_of[hop.peer] == hop.stage for route in routes for hop in route)
        await peer.planner.close()

    run(scenario())


def test_a_search_that_fails_is_told_once_and_drawn_routes_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such luck")

    async def scenario() -> None:
        peer = Peer(measured(0.1))
        with monkeypatch.context() as patched:
            patched.setattr("murmuration.worker.pipeline.planner.search_routes", broken)
            for iteration in range(1, 5):
                routes, name = peer.planner.routes(iteration)
                assert (len(routes), name) == (2, peer.planner.name)
                await peer.searches.let_go()
        text = "no routes were searched: ValueError: no such luck"
        assert peer.events == [{"event": "warning", "text": text}]
        assert peer.searches.begun == 1
        peer.members = measured(0.3)  # other measurements are searched for again
        peer.planner.routes(5)
        await peer.searches.let_go()
        assert on_plan(peer, 6)
        await peer.planner.close()

    run(scenario())


def test_who_does_not_serve_sends_nothing() -> None:
    async def scenario() -> None:
        members = measured(0.1)
        assert Peer(members, "p9").planner.routes(1) == ([(), ()], snapshot_name(members))
        assert Peer(members_of(1, 2), "p0").planner.routes(1)[0] == [(), ()]

    run(scenario())


@pytest.mark.parametrize(
    ("count", "skip"),
    [(2, 0.0), (2, 0.25), *product((4, 6, 9), (0.0, 0.25, 0.5))],
)
def test_rules_can_be_kept_whatever_stages_are_left(count: int, skip: float) -> None:
    config = StagesConfig(count=count, routing="random", skip=skip)
    whole = config.rules(1)
    for left in range(1, count + 1):
        snapshot = snapshot_of(members_of(*range(left)))
        assert snapshot is not None
        rules = planned_rules(config, snapshot, 1)
        assert rules.stages == left
        assert (rules.visited > 1) == (left > 1)
        assert rules.stages - rules.visited <= whole.stages - whole.visited
        assert left < count or rules == whole
