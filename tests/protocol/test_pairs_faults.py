"""Rounds in pairs under faults, between real nodes: they cost the pair a round, others nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.node.node import Node
from murmuration.worker.transport import Method, Stream, Unreachable
from tests.protocol.pair_taps import (
    NOLOCO,
    SLOW,
    GossipMessage,
    failures_of,
    first,
    in_round,
    meetings,
    rounds_of,
    steady,
)
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.false_means import giving
from tests.support.frames import frames_of
from tests.support.liar import contributes_late, contributes_nothing

STREAMING = replace(
    PRESETS["streaming-noloco"],
    inner_steps=6,
    fragments=2,
    overlap_steps=3,
    codec="bf16",
    consensus=False,
)
KEEP = replace(NOLOCO, codec="sign", merge="keep")
EACH = pytest.mark.parametrize(
    "plan", [NOLOCO, STREAMING, KEEP], ids=["noloco", "streaming-noloco", "keep"]
)

pytestmark = pytest.mark.usefixtures("brief_end")


@pytest.mark.parametrize(
    ("kind", "victim", "peers"),
    [
        ("contribution part", "listener", 5),
        ("contribution frame", "speaker", 4),
        ("prepared", "speaker", 4),
        ("prepared", "listener", 5),
    ],
)
async def test_a_partner_killed_amid_an_exchange_costs_that_pair_one_round(kind, victim, peers):
    async with Swarm(steady(80, SLOW), "abcde"[:peers]) as swarm:
        pair: list[str] = []

        def kill(said: GossipMessage) -> None:
            ends = [said.speaker, said.listener]
            pair.extend(ends if victim == "speaker" else ends[::-1])
            swarm.kill(pair[0])

        swarm.tap = first(in_round(swarm, 2, kind), kill)
        await swarm.finished()
        for peer in swarm.alive:
            lost = [round_ for round_ in range(4) if round_ not in rounds_of(peer)]
            assert len(lost) <= (peer.name == pair[1]), (peer.name, pair)
            assert peer.versions == (4,)


async def test_a_peer_that_dies_between_rounds_is_missed_in_one_round_at_most():
    """Its anchor has gone ahead to the partner of the next round."""
    async with Swarm(steady(80, SLOW), "abcde") as swarm:
        await swarm.until(lambda: swarm["a"].versions == (2,), 30)
        await swarm.sleep(0.7)
        swarm.kill("e")
        await swarm.finished()
        assert sum(len(failures_of(peer)) for peer in swarm.alive) <= 1


@EACH
async def test_a_peer_frozen_for_a_while_comes_back_where_the_others_are(plan):
    async with Swarm(steady(84, plan), "abcd") as swarm:
        await swarm.until(lambda: swarm["a"].versions[0] == 2, 30)
        await swarm.sleep(0.7)
        swarm.freeze("d")
        stood = swarm["d"].versions
        await swarm.sleep(18)
        assert swarm["d"].versions == stood
        others = [swarm[name] for name in "abc"]
        assert all(peer.versions[0] >= stood[0] + 3 for peer in others)
        back_at = min(peer.trainer.step for peer in others)
        swarm.thaw("d")
        await swarm.finished()
        # It is drawn until it is declared dead; then the others are among themselves.
        assert all(failed < 5 for peer in others for failed in failures_of(peer))
        (skipped,) = swarm["d"].of_kind("skipped")
        assert skipped["step"] >= back_at - 5
        late = [event for event in swarm["d"].of_kind("round") if event["round"] > stood[0] + 1]
        assert len(late) >= 4
        assert late[-1]["contributors"] == 2


def serves(partner: Callable[[Stream], Awaitable[object]]) -> Callable[[Node], None]:
    """A lie: it serves the streams of its partners so."""
    return lambda node: node.server.streams.update({Method.PAIR_ROUND: partner})


async def garbage(stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"\x0a\xff")


LIES = {
    "never answers": serves(lambda _: asyncio.Event().wait()),
    "answers garbage": serves(garbage),
    "contributes 4 s late": partial(contributes_late, late_s=4.0),
    "contributes nothing": contributes_nothing,
}


@pytest.mark.parametrize(
    ("others", "lie"),
    # Of two nobody knows which one is slow.
    [*(("abc", lie) for lie in LIES), ("a", "never answers"), ("a", "contributes nothing")],
)
async def test_a_partner_that_is_often_late_is_drawn_no_more(others, lie):
    async with Swarm(Problem(plan=NOLOCO, steps=1_000_000), [*others, "d"], at=4) as swarm:
        LIES[lie](swarm["d"].node)
        await swarm.until(lambda: "d" in swarm["a"].node.gossip.view.cut_off, 40)
        await swarm.sleep(5)  # who was kept waiting is back
        (before,) = swarm["a"].versions
        await swarm.sleep(4)
        assert swarm["a"].versions >= (before + 6,)
        warnings = [text for name in others for text in swarm[name].warnings]
        assert 2 * len(warnings) > len(others)
        assert all(text.startswith("d says that it trains") for text in warnings)


@pytest.mark.parametrize(("plan", "within_s"), [(NOLOCO, 30), (STREAMING, 12)])
async def test_one_of_eight_that_is_late_is_named_by_those_that_met_it(plan, within_s):
    """Each of them meets it in few rounds, and nobody else is named."""
    problem = Problem(layers=(300, 200), plan=plan, steps=1_000_000)
    async with Swarm(problem, "abcdefgh") as swarm:
        await swarm.until(lambda: min(swarm["a"].versions) >= 4, 60)
        contributes_late(swarm["h"].node, 4.0)
        await swarm.until(lambda: "h" in swarm["a"].node.gossip.view.cut_off, within_s)
        await swarm.sleep(3)  # who was kept waiting is back
        (before, *_) = swarm["a"].versions
        await swarm.sleep(4)
        assert swarm["a"].versions[0] >= before + 6
        assert {text.split()[0] for name in "abcdefg" for text in swarm[name].warnings} == {"h"}


FALSE = {
    "contributions of 1e4": {"contribution": lambda own: torch.full_like(own, 1e4)},
    "contributions times -20": {"contribution": lambda own: -20 * own},
    "anchors of 1e4": {"anchor": lambda own: torch.full_like(own, 1e4)},
    "anchors of 3.0": {"anchor": lambda own: torch.full_like(own, 3.0)},
}


@pytest.mark.parametrize("lie", FALSE)
@pytest.mark.parametrize("plan", [NOLOCO, STREAMING], ids=["noloco", "streaming-noloco"])
async def test_what_a_partner_gives_moves_nobody_far(plan, lie):
    """The honest are pulled to points that are 20 from their mean, and end within 15 of it: within
    12 where all are honest. One that gives far too much is named by most."""
    problem = Problem((300, 200), plan=plan, steps=120)
    pulls = [torch.cat([*Synthetic(problem, each)._targets.values()]) for each in "abc"]
    with giving("d", **FALSE[lie]):
        async with Swarm(problem, "abcd") as swarm:
            await swarm.finished()
    peers = [swarm[name] for name in "abc"]
    for peer in peers:
        found = torch.cat([*peer.replica.parameters.values()])
        assert float((found - sum(pulls) / len(pulls)).norm()) < 15
    named = sum(peer.warned("d says that it trains") for peer in peers)
    assert (2 * named > len(peers)) == (lie != "anchors of 3.0")


@pytest.mark.parametrize(
    ("kind", "calls", "plan"),
    [
        ("header", True, NOLOCO),
        ("anchor frame", False, NOLOCO),
        ("contribution part", True, NOLOCO),
        ("prepared", True, NOLOCO),
        ("prepared", False, NOLOCO),
        ("contribution frame", False, NOLOCO),
        ("contribution frame", True, STREAMING),
        ("contribution frame", False, KEEP),
    ],
)
def test_a_stream_that_breaks_goes_on_where_it_was(kind, calls, plan):
    """No byte of a payload arrives twice, and all end where the reference does."""

    async def scenario() -> int:
        async with Swarm(steady(14, plan)) as swarm:
            broken = []

            def cut(said: GossipMessage) -> None:
                broken.append(said)
                swarm.cut(said.speaker, said.listener)
                swarm.loop.call_later(0.4, swarm.heal, said.speaker, said.listener)

            here = in_round(swarm, 1, kind)
            swarm.tap = first(lambda s: here(s) and (s.speaker < s.listener) is calls, cut)
            received_bytes = await until_the_reference(swarm)
            assert broken
            return received_bytes

    with frames_of(128):
        assert run(scenario()) == received_undisturbed(plan)


@cache
def received_undisturbed(plan: Plan) -> int:
    """Bytes of payloads, by all."""

    async def scenario() -> int:
        async with Swarm(steady(14, plan)) as swarm:
            return await until_the_reference(swarm)

    return run(scenario())


async def until_the_reference(swarm: Swarm) -> int:
    await swarm.start(*"abcd")
    await swarm.ends_at_reference()
    assert all(failures_of(peer) == [] for peer in swarm.alive)
    return sum(peer.payload_received_bytes for peer in swarm.alive)


async def test_what_two_generals_cannot_settle():
    """`a` has heard that `b` holds everything, and its own word is lost, as is the link.

    Then `a` has applied the round and `b` has not; `b` keeps its anchor and its local parameters,
    and both go on to the next round. What they are apart, later rounds make good."""
    problem = steady(100)
    async with Swarm(problem, "ab") as swarm:
        cut = False

        def lose(said: GossipMessage) -> None:
            nonlocal cut
            if said.kind == "prepared" and swarm[said.speaker].versions == (2,) and not cut:
                if said.speaker == "a":
                    raise Unreachable("lost")
                cut = True
                swarm.cut("a", "b")

        def unreachable() -> float:
            one, other = (swarm[name].trainer.states[0].anchor for name in "ab")
            return float((one - other).norm())

        swarm.tap = meetings(lose)
        await swarm.until(lambda: swarm["b"].versions == (2,), 30)
        before = swarm["b"].trainer.states[0].anchor
        await swarm.until(lambda: failures_of(swarm["b"]) == [2], 60)
        assert rounds_of(swarm["a"])[:3] == [0, 1, 2]
        assert rounds_of(swarm["b"]) == [0, 1]
        assert swarm["b"].versions == (3,)
        assert swarm["b"].trainer.states[0].anchor is before
        torn = unreachable()
        assert torn > 0
        for peer in swarm.alive:
            peer.replica.moves_until = 0  # from here on nothing pulls them apart
        swarm.heal("a", "b")
        await swarm.finished()
        assert unreachable() < 0.05 * torn
        for peer in swarm.alive:
            assert peer.of_kind("round")[-1]["contributors"] == 2


@pytest.mark.parametrize("calls", [True, False])
async def test_the_last_word_is_said_again_if_the_link_comes_back(calls):
    """Whoever has applied the round repeats what it said, so that the other applies it too."""
    async with Swarm(steady(25), "abcd") as swarm:

        def lose(said: GossipMessage) -> None:
            swarm.loop.call_later(0.3, swarm.heal, said.speaker, said.listener)
            swarm.cut(said.speaker, said.listener)
            raise Unreachable("lost")

        says = in_round(swarm, 2, "prepared")
        swarm.tap = first(lambda s: says(s) and (s.speaker < s.listener) is calls, lose)
        await swarm.ends_at_reference()


@pytest.mark.parametrize(
    ("plan", "at_s"),
    [(NOLOCO, 7.6), (STREAMING, 5.3), (KEEP, 5.3)],
    ids=["noloco", "streaming-noloco", "keep"],
)
async def test_a_late_joiner_starts_from_a_neighbours_anchors(plan, at_s):
    async with Swarm(steady(60, plan), "abc") as swarm:
        await swarm.sleep(at_s)
        await swarm.join("d", via="a")
        await swarm.until(lambda: swarm["d"].of_kind("adopted") != [], 5)
        (adopted,) = swarm["d"].of_kind("adopted")
        assert adopted["reason"] == "joining"
        assert adopted["donor"] in "abc"
        await swarm.finished()
        assert swarm["d"].trainer.metrics.inner_steps < 60
        assert swarm["d"].versions == swarm["a"].versions
        assert 2 in [event["contributors"] for event in swarm["d"].of_kind("round")]
        # Who has not heard of it yet draws other pairs: that may cost a round, once.
        for peer in swarm.alive:
            assert len(failures_of(peer)) <= len(peer.versions)


async def test_membership_that_changes_after_the_anchor_was_sent_ahead_lays_new_pairs():
    """In time for everyone to hear of it before the round: then it costs nobody anything."""
    problem = steady(60, replace(NOLOCO, inner_steps=15))
    async with Swarm(problem, "abc") as swarm:
        ahead = []
        swarm.tap = meetings(
            lambda said: ahead.append(said) if said.kind == "anchor frame" else None
        )
        await swarm.until(lambda: {peer.versions for peer in swarm.alive} == {(1,)}, 30)
        await swarm.until(lambda: ahead[-1].kind == "anchor frame", 1)
        await swarm.join("d", via="a")
        await swarm.finished()
        for peer in swarm.alive:
            assert failures_of(peer) == []
        assert rounds_of(swarm["a"]) == [0, 1, 2, 3]
        assert [e["contributors"] for e in swarm["d"].of_kind("round")] == [2, 2, 2]


async def test_peers_that_finish_at_different_times_do_not_hold_each_other_up():
    problem = replace(steady(40), step_s={"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.55})
    async with Swarm(problem, "abcd") as swarm:
        await swarm.finished()
        assert {peer.versions for peer in swarm.alive} == {(8,)}
        assert swarm.loop.time() < 40 * 0.55 + 8 * RoundConfig().patience_s + 5.0 + 5.0
