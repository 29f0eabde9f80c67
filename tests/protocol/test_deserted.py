"""Nobody waits for ever: the peers that a joiner has come to leave or die before it has begun."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.errors import PeersUnreachable
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run

LIMIT_S = 60.0


async def killed(swarm: Swarm, name: str) -> None:
    swarm.kill(name)


async def frozen(swarm: Swarm, name: str) -> None:
    swarm.freeze(name)


async def left(swarm: Swarm, name: str) -> None:
    await swarm.leave(name)


Goes = Callable[[Swarm, str], Awaitable[None]]
GOES = pytest.mark.parametrize("goes", [killed, frozen, left])


def knows(peer: Peer, name: str) -> bool:
    return any(member["peer"] == name for member in peer.members)


async def ended(swarm: Swarm, name: str) -> PeersUnreachable:
    """How the peer ends, within a minute."""
    with pytest.raises(PeersUnreachable) as caught:
        await swarm.until(lambda: False, LIMIT_S)
    assert swarm[name].train.error is caught.value
    return caught.value


@GOES
@pytest.mark.parametrize("plan", [Plan(inner_steps=50), PRESETS["noloco"]])
def test_the_first_peer_goes_before_a_joiner_is_a_member(goes: Goes, plan: Plan) -> None:
    async def scenario() -> None:
        async with Swarm(Problem(layers=(300, 200), plan=plan, steps=200)) as swarm:
            await swarm.join("a", via=())
            await swarm.sleep(1.0)
            await goes(swarm, "a")
            await swarm.join("b", via="a", min_peers=None, wait_s=float("inf"))
            await swarm.until(lambda: swarm["b"].of_kind("awaiting") != [], 10)
            assert swarm["b"].of_kind("awaiting")[0]["here"] == ["b"]
            assert "there is no run to join any more: " in str(await ended(swarm, "b"))

    run(scenario())


@GOES
@pytest.mark.parametrize("others", [[], ["c"]])
def test_the_first_peer_goes_while_it_waits_for_more(goes: Goes, others: list[str]) -> None:
    """None of the joiners has anything of a run: it has not begun."""

    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.join("a", via=(), min_peers=4)
            for name in ["b", *others]:
                await swarm.join(name, via="a", min_peers=None, wait_s=float("inf"))
            await swarm.until(lambda: knows(swarm["b"], "a"), 5)
            await swarm.sleep(2.5)
            assert swarm["b"].of_kind("awaiting")[0]["here"] == ["a", "b", *others]
            await goes(swarm, "a")
            assert "a " in str(await ended(swarm, "b"))
            for name in others:
                with pytest.raises(PeersUnreachable):
                    raise swarm[name].train.error or await ended(swarm, name)

    run(scenario())


@pytest.mark.parametrize("at_s", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("goes", [killed, left])
def test_the_first_peer_goes_while_its_state_is_fetched(goes: Goes, at_s: float) -> None:
    """On a slow link; the joiner has the state and goes on, or ends with a line."""

    async def scenario() -> None:
        async with Swarm(replace(steady(4000), layers=(200_000,)), delay_s=0.1) as swarm:
            await swarm.join("a", via=())
            await swarm.until(lambda: swarm["a"].versions >= (1,), 30)
            b = await swarm.join("b", via="a", min_peers=None, wait_s=float("inf"))
            await swarm.until(lambda: knows(b, "a"), 5)
            await swarm.sleep(at_s)
            await goes(swarm, "a")
            await swarm.until(lambda: b.of_kind("started") != [] or b.train.ended, LIMIT_S)
            assert b.train.error is None or isinstance(b.train.error, PeersUnreachable)

    run(scenario())


@GOES
@pytest.mark.parametrize("plan", [Plan(inner_steps=3), PRESETS["noloco"]])
def test_a_joiner_that_holds_the_state_goes_on_alone(goes: Goes, plan: Plan) -> None:
    """After a restart of both, from what they have saved."""

    async def scenario() -> None:
        async with Swarm(Problem(layers=(300, 200), plan=plan, steps=300)) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: swarm["b"].versions >= (1,), 300)
            before = swarm["b"].versions
            for name in "ab":
                swarm.kill(name)
            b = swarm.peers.pop("b")
            swarm.peers["b, killed"] = b
            await swarm.sleep(10.0)
            await swarm.join("c", via=(), min_peers=3)
            again = await swarm.join(
                "b", via="c", address="b2", min_peers=None, before=b, wait_s=float("inf")
            )
            await swarm.until(lambda: knows(again, "c"), 5)
            await goes(swarm, "c")
            await swarm.until(lambda: again.of_kind("started") != [], LIMIT_S)
            await swarm.until(lambda: again.versions > before, LIMIT_S)

    run(scenario())


def test_a_peer_that_is_back_in_time_is_waited_for() -> None:
    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.join("a", via=(), min_peers=2)
            await swarm.sleep(1.0)
            swarm.kill("a")
            b = await swarm.join("b", via=["a", "a'"], min_peers=None, wait_s=float("inf"))
            await swarm.sleep(10.0)
            assert not b.train.ended
            before = swarm.peers.pop("a")
            swarm.peers["a, killed"] = before
            await swarm.join("a", via=(), min_peers=2, address="a'")
            await swarm.finished()
            swarm.assert_equal()

    run(scenario())


def test_who_waits_says_so_every_half_minute() -> None:
    """A joiner waits as long as the first peer does, which waits for a third."""

    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.join("a", via=(), min_peers=3, wait_s=300.0)
            b = await swarm.join("b", via="a", min_peers=None, wait_s=float("inf"))
            await swarm.sleep(125.0)
            for name in "ab":
                told = [(e["here"], e["wanted"]) for e in swarm[name].of_kind("awaiting")]
                assert told == [(["a", "b"], 3 if name == "a" else None)] * 5, told
            await swarm.join("c", via="a", min_peers=None, wait_s=float("inf"))
            await swarm.finished()
            assert not b.of_kind("adopted")

    run(scenario())


def test_how_long_a_joiner_waits_may_be_said() -> None:
    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.join("a", via=(), min_peers=3, wait_s=300.0)
            await swarm.join("b", via="a", min_peers=None, wait_s=5.0)
            assert str(await ended(swarm, "b")).startswith("no start after 5 s (here: a, b)")

    run(scenario())
