"""A member announces a state that few others have, and gives it to whoever asks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.catchup import donors
from murmuration.worker.membership import Digest, Member, MemberLimits, Phase
from murmuration.worker.node.node import Node
from murmuration.worker.training.mailbox import Published
from murmuration.worker.transport import Stream
from tests.protocol.problem import steady
from tests.protocol.swarm import Peer, Swarm
from tests.support.liar import (
    ends_and_names,
    gives_other_bytes,
    hangs_then_lies,
    late_to_one_then_near,
    lie,
)

late_to_a_then_near = partial(late_to_one_then_near, other="a")


def parts_then_near(node: Node) -> None:
    """After the first round of which it gives each peer another mean it is ahead of all."""
    gives_other_bytes(node)
    publish, before = node._publish, node.published

    def published(now: Published) -> None:
        publish(now)
        if before and now.states[0].version > before.states[0].version:
            node._publish = publish  # type: ignore[method-assign]  # it lies
            lie(node, 8, None)

    node._publish = published  # type: ignore[method-assign]  # it lies


def knows(peer: Peer, name: str) -> bool:
    return any(member["peer"] == name for member in peer.members)


@pytest.mark.parametrize(
    ("honest", "liars", "phase"),
    [("abc", "x", Phase.TRAINING), ("abc", "xy", Phase.DONE)],
    ids=lambda value: getattr(value, "name", value),
)
async def test_a_state_of_no_majority_is_not_taken(honest, liars, phase):
    """Though the liars have contributed before, and confirm each other's state. Reducers that end
    so may part two honest peers, which is mended among these."""
    async with Swarm(steady(100_000), [*honest, *liars], at=2) as swarm:
        for name in liars:
            lie(swarm[name].node, 12, phase=phase)  # ahead for as long as it takes to be told
        told = f"fetching from {liars[0]}: "
        await swarm.until(lambda: all(swarm[name].warned(told) for name in honest), 120)
        await swarm.sleep(5)
        for name in honest:
            for event in swarm[name].of_kind("adopted"):  # where two honest ones have parted
                assert {event["donor"], *event["confirmed_by"]} <= {*honest}
            assert swarm[name].versions >= (6,)


@pytest.mark.parametrize(
    ("honest", "turns"),
    [
        ("abcd", hangs_then_lies),
        ("ab", late_to_a_then_near),
        ("abcd", late_to_a_then_near),
        ("abc", parts_then_near),
    ],
)
async def test_of_peers_that_are_not_together_none_believes_a_lone_other(honest, turns):
    """Rounds stand still; the liar sees to it that one is a round behind, with which it would be
    half of four; or that all differ."""
    async with Swarm(steady(100_000), [*honest, "x"], at=2) as swarm:
        turns(swarm["x"].node)
        told = "fetching from x: no other peer has its state"
        await swarm.until(lambda: all(swarm[name].warned(told) for name in honest), 80)
        await swarm.sleep(6)
        adopted = [event for name in honest for event in swarm[name].of_kind("adopted")]
        assert all(event["donor"] in honest for event in adopted)
        assert turns is parts_then_near or not adopted


@pytest.mark.parametrize(
    ("there", "lies"),
    [("ax", {}), ("a", {"ahead": 30}), ("ax", {"value": None, "momentum": 1e8})],
    ids=["in rounds before", "a stranger", "momentum"],
)
async def test_alone_with_a_liar_a_peer_goes_on(there, lies):
    async with Swarm(steady(1000), there, at=20) as swarm:
        if there == "a":
            await swarm.join("x", via="a")
            await swarm.until(lambda: swarm["x"].node.published is not None, 10)
        lie(swarm["x"].node, **{"ahead": 6, **lies})
        told = "fetching from x: its state is too far from this peer's"
        await swarm.until(lambda: swarm["a"].warned(told), 40)
        (before,) = swarm["a"].versions
        await swarm.sleep(15)
        assert swarm["a"].of_kind("adopted") == []
        assert swarm["a"].versions >= (before + 4,)


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"ahead": 6, "value": float("nan")}, "NaN"),
        ({"ahead": 6, "odd": True}, "another state than the announced"),
        ({"ahead": 6, "gives": 9000}, "announced was"),
        ({"ahead": 6, "gives": -1}, "another state than the announced"),
        ({"ahead": 5000}, "nobody can be at"),
        ({"ahead": 6, "group": tuple(f"ghost {n}" for n in range(300))}, "a group of 300 peers"),
        ({"ahead": 6, "group": ("x", "a", "x")}, "a group of 3 peers, or one twice"),
    ],
    ids=["NaN", "another hash", "far ahead", "older", "too far", "ghosts", "a peer twice"],
)
async def test_a_false_state_is_not_taken(lies, says):
    async with Swarm(steady(100_000), "ax", at=2) as swarm:
        lie(swarm["x"].node, **lies)
        await swarm.until(lambda: swarm["a"].warned(says), 60)
        await swarm.until(lambda: swarm["a"].versions >= (5,), 60)
        assert swarm["a"].of_kind("adopted") == []


async def test_a_donor_that_starts_again_meanwhile_harms_nobody():
    async with Swarm(steady(100_000), "ax", at=20) as swarm:
        node = swarm["x"].node
        lie(swarm["x"].node, 6)
        serve = node.server.streams["Data/Fetch"]

        async def restart(stream: Stream) -> None:
            node.gossip.update(digests=())
            await swarm.sleep(1)
            await serve(stream)

        node.server.streams["Data/Fetch"] = restart
        await swarm.sleep(30)
        assert swarm["a"].of_kind("adopted") == []
        assert swarm["a"].versions >= (21,)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "never contributed"])
async def test_two_that_do_not_train_cannot_part_two_that_do(ended):
    async with Swarm(steady(100_000), ["a", "b", *("xy" if ended else "")]) as swarm:
        await swarm.until(lambda: swarm["a"].versions >= (2,), 60)
        for name in "xy":
            if not ended:
                await swarm.join(name, via="a")
                await swarm.until(lambda n=name: knows(swarm["a"], n), 10)
            ends_and_names(swarm[name].node, "b")
        await swarm.sleep(16)
        (state,) = swarm["a"].trainer.states
        assert state.version > 4
        assert all("b" in peers for each in state.history for *_, peers in each.parts)


async def test_a_peer_that_slept_takes_over_what_the_one_other_has():
    async with Swarm(steady(100_000), "ab", at=2) as swarm:
        swarm.freeze("b")
        await swarm.until(lambda: swarm["a"].versions >= (6,), 120)
        swarm.thaw("b")
        await swarm.until(lambda: bool(swarm["b"].of_kind("adopted")), 60)
        await swarm.until(swarm.agrees, 60)
        assert [event["donor"] for event in swarm["b"].of_kind("adopted")] == ["a"]


# A reducer that gives other bytes to each peer is named, and those that it parts pass it over.


async def test_a_reducer_that_parts_all_is_passed_over():
    honest = "abcde"
    async with Swarm(steady(100_000), [*honest, "x"], at=2) as swarm:
        gives_other_bytes(swarm["x"].node)
        await swarm.sleep(35)
        told = [[w for w in swarm[name].warnings if "false" in w] for name in honest]
        assert all(text.startswith("x gave ") for texts in told for text in texts), told
        assert all(swarm[name].warned("x gave a false mean: ") for name in honest), told
        # It may just have been let in again, have parted them, and been caught.
        await swarm.until(lambda: swarm.agrees(*honest), 15)
        assert all(swarm[name].versions >= (6,) for name in honest)
        assert all(len(swarm[name].of_kind("adopted")) <= 5 for name in honest)


async def test_of_three_it_is_named_and_causes_few_adoptions():
    """Either of the two others could lie about what it was given."""
    async with Swarm(steady(100_000), "abx", at=2) as swarm:
        gives_other_bytes(swarm["x"].node)
        await swarm.sleep(40)
        for name, other in ("ab", "ba"):
            assert swarm[name].warned(f"x gave {other} another reduction of version ")
            assert len(swarm[name].of_kind("adopted")) <= 5
            assert swarm[name].versions >= (10,)


@pytest.mark.parametrize("pieces", [1, 6])
async def test_a_joiner_is_told_by_two_and_not_held_up_by_a_liar(pieces, monkeypatch):
    """All have heard of the liar, which is ahead, and would be taken over before anybody else. Six
    fragments are more than the states of each that a peer remembers, as 300 are in earnest."""
    monkeypatch.setattr("murmuration.algorithms.fragments.PIECE_ELEMENTS", 150)
    monkeypatch.setattr(donors, "REMEMBERED", 4)
    async with Swarm(replace(steady(200), layers=(150,) * pieces), "abx", at=2) as swarm:
        assert len(swarm["a"].versions) == pieces
        await swarm.until(lambda: min(swarm["a"].versions) >= 2, 10)
        lie(swarm["x"].node, 6, None, phase=Phase.TRAINING)
        await swarm.sleep(1)
        await swarm.join("c", via=["x"])
        await swarm.until(lambda: bool(swarm["c"].of_kind("adopted")), 10)
        for adopted in swarm["c"].of_kind("adopted"):
            assert {adopted["donor"], *adopted["confirmed_by"]} == {"a", "b"}
        assert [event for name in "ab" for event in swarm[name].of_kind("adopted")] == []


@pytest.mark.parametrize("ahead", [0, 200])
@pytest.mark.parametrize("plan", ["diloco", "noloco"])
async def test_a_donor_does_not_say_where_a_joiner_is_in_the_run(plan, ahead):
    """Nor how many rounds its state has: the bytes of that may be those that others have."""
    problem = replace(steady(100_000), plan=replace(PRESETS[plan], inner_steps=5))
    async with Swarm(problem, "abc", at=2) as swarm:
        node = swarm["a"].node
        assert node.published is not None
        states = tuple(replace(s, version=s.version + ahead) for s in node.published.states)
        node.published = replace(node.published, entry_step=99_990, states=states)
        node._publish = lambda published: None  # type: ignore[method-assign]  # it lies
        await swarm.join("x", via="b")
        await swarm.until(lambda: swarm["x"].of_kind("adopted") != [], 20)
        refused = plan == "diloco" and ahead
        assert (swarm["x"].of_kind("adopted")[0]["donor"] == "a") is not bool(refused)
        assert swarm["x"].trainer.step < 100
        assert swarm["x"].versions < (10,)


def at(version: int, step: int) -> Member:
    return Member("w1", "host:1", 1, phase=Phase.TRAINING, step=step, digests=digests(version))


def digests(*versions: int) -> tuple[Digest, ...]:
    return tuple(Digest(version, 2, 7) for version in versions)


@pytest.mark.parametrize(
    ("version", "step", "possible"),
    [(10, 100, True), (14, 140, True), (40, 100, False), (10, 500, False), (8, 80, True)],
)
def test_how_far_the_others_can_be(version, step, possible):
    """At one step a second, from step 90 to 100: at most 16 times as many, and four rounds."""
    limits = MemberLimits(steps=10**9, fragments=1, inner_steps=10)
    mine: Sequence[Digest] = digests(10)
    assert limits.can_be_at(at(10**9, 10**9), mine, 0.0), "nothing is known yet"
    for second in range(11):
        limits.takes(90 + second, 1.0, float(second))
    assert limits.can_be_at(at(version, step), mine, 10.0) == possible
    assert limits.can_follow(10**9 + 2, 10**9)
    assert not limits.can_follow(10**9 + 3, 10**9), "nobody would believe it"
    # A peer that stood still for a minute finds the others far ahead.
    assert limits.can_be_at(at(version, step), mine, 70.0)
