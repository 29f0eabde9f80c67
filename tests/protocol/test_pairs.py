"""Rounds in pairs between real nodes: without faults all end where the reference does. What
does not fit into a round costs no more than that round, and rounds go around links that are
cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.algorithms.schedule import Due
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.training.mailbox import SkipAhead
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
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm

PEERS = "abcde"

THREE = replace(PRESETS["noloco"], inner_steps=3, consensus=False)
PAPER = replace(THREE, shared_momentum=False, outer_momentum=0.5, outer_lr=0.7, outer_pull=0.7)
PLANS = {
    "noloco": THREE,
    "the paper's update": PAPER,
    "streaming-noloco": replace(
        PRESETS["streaming-noloco"], inner_steps=4, fragments=2, overlap_steps=2
    ),
    "overlap over a whole period": replace(
        THREE, fragments=2, overlap_steps=3, merge_alpha=0.25, codec="bf16"
    ),
    "eight bits": replace(THREE, codec="int8"),
    "two fragments": replace(THREE, fragments=2),
    "groups of three": replace(THREE, group_size=3),
    "one anchor in the end": replace(THREE, consensus=True),
    "what was not sent is kept": replace(THREE, codec="sign", merge="keep"),
    "the paper's update, and that kept": replace(PAPER, codec="topk256", merge="keep"),
    "that kept over an overlap, and one replica in the end": replace(
        THREE, fragments=2, overlap_steps=2, codec="sign", merge="keep", consensus=True
    ),
}


@pytest.mark.parametrize(
    ("name", "peers"),
    [*((name, 5) for name in PLANS), ("noloco", 2), ("noloco", 4), ("streaming-noloco", 4)],
)
async def test_all_peers_end_with_the_state_of_the_reference(name, peers):
    plan = PLANS[name]
    problem = Problem(layers=(211, 97, 150), plan=plan, steps=16)
    async with Swarm(problem, PEERS[:peers]) as swarm:
        await swarm.ends_at_reference()
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            assert peer.refused == {}
        taken = sum(len(peer.of_kind("early_start")) for peer in swarm.alive)
        assert (taken > 0) == plan.shared_momentum
        assert swarm.agrees() == (plan.consensus or peers <= plan.group_size)


@pytest.mark.parametrize("preset", ["noloco", "streaming-noloco"])
async def test_anchors_come_ahead_on_long_links_too(preset):
    """Half a second there and back, and nothing comes for longer than that."""
    plan = replace(PRESETS[preset], inner_steps=20, fragments=1, consensus=False)
    problem = Problem(layers=(300, 200), plan=plan, steps=100, step_s=dict.fromkeys(PEERS, 0.5))
    async with Swarm(problem, PEERS[:4], delay_s=0.25) as swarm:
        await swarm.ends_at_reference()
        for peer in swarm.alive:
            # A single step is undone, if any: of five rounds the first has no anchors ahead.
            taken = peer.of_kind("early_start")
            assert len(taken) >= 4
            assert max(event["step"] % 20 for event in taken) <= plan.overlap_steps + 5


PROBLEM = Problem(steps=15, plan=replace(PRESETS["noloco"], inner_steps=3))


def damaged(said: GossipMessage) -> bytes:
    payload = bytearray(said.message.frame.payload)
    payload[len(payload) // 2] ^= 1
    said.message.frame.payload = bytes(payload)
    return said.message.SerializeToString()


@pytest.mark.parametrize(("kind", "calls"), [("anchor frame", True), ("contribution frame", False)])
async def test_a_damaged_frame_is_sent_again_within_the_round(kind, calls):
    async with Swarm(PROBLEM, "abcd") as swarm:
        swarm.tap = first(
            lambda said: said.kind == kind and (said.speaker < said.listener) is calls, damaged
        )
        await swarm.ends_at_reference()
        refused = [event["reason"] for p in swarm.alive for event in p.of_kind("refused")]
        assert len(refused) == 1
        assert "damaged" in str(refused[0])
        assert sum(peer.refused.get("again", 0) for peer in swarm.alive) == 1


def nan(said: GossipMessage) -> bytes:
    """A contribution of the right size, of values that are no numbers."""
    payload = np.full(300, np.nan, "<f4").tobytes()
    if said.kind.endswith("part"):
        said.message.part.hash = wire.hash64(payload)
    else:
        frame = pb.Frame(offset=0, payload=payload, hash=wire.hash64(payload))
        said.message.frame.CopyFrom(frame)
    return said.message.SerializeToString()


@pytest.mark.parametrize("calls", [True, False], ids=["who calls", "who is called"])
async def test_a_contribution_that_does_not_fit_costs_the_pair_that_round(calls):
    """At once, not at a deadline: it would be the same the next time."""
    async with Swarm(PROBLEM, "abcd") as swarm:
        pair: list[str] = []

        def spoil(said: GossipMessage) -> bytes | None:
            ends = [said.speaker, said.listener]
            mine = swarm[said.speaker].versions == (1,) and (ends[0] < ends[1]) is calls
            if said.kind == "contribution part" and mine and not pair:
                pair.extend(ends)
            wrong = pair == ends and swarm[said.speaker].versions == (1,)
            return nan(said) if wrong and said.kind.startswith("contribution") else None

        swarm.tap = meetings(spoil)
        await swarm.finished()
        listener = swarm[pair[1]]
        assert "NaN" in str(listener.of_kind("refused")[0]["reason"])
        assert listener.refused["invalid"] >= 1
        for peer in swarm.alive:
            lost = [event["round"] for event in peer.of_kind("round_failed")]
            assert lost == ([1] if peer.name in pair else [])
            assert all(event["stall_s"] < 1 for event in peer.of_kind("round"))
            assert torch.isfinite(peer.trainer.states[0].anchor).all()


SIX_STEPS = replace(
    PRESETS["streaming-noloco"], inner_steps=6, fragments=2, overlap_steps=3, consensus=False
)


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize("plan", [NOLOCO, SIX_STEPS], ids=["noloco", "streaming-noloco"])
async def test_a_round_that_is_skipped_as_soon_as_it_has_begun_is_over(plan):
    """The word comes amid the step after which both begin it: too late to be heeded before."""
    problem = Problem((300, 200), plan=plan, steps=60, step_s=dict.fromkeys("ab", 0.5))
    schedule = plan.schedule(fragments=plan.fragments, steps=60)
    begins, goes_on = (schedule.send_step(Due(0, round_)) for round_ in (2, 7))

    def rounds(peer: Peer, kind: str) -> list[object]:
        return [event["round"] for event in peer.of_kind(kind) if event["fragment"] == 0]

    async with Swarm(problem, "ab") as swarm:
        await swarm.until(lambda: {peer.trainer.step for peer in swarm.alive} == {begins}, 30)
        for peer in swarm.alive:
            peer.train.answer(SkipAhead(goes_on))
        await swarm.finished()
        for peer in swarm.alive:
            assert rounds(peer, "round_failed") == [2]
            assert rounds(peer, "round") == [0, 1, *range(8, schedule.rounds(0))]
            assert {event["contributors"] for event in peer.of_kind("round")} == {2}


def contributors_of(peer: Peer) -> dict[object, object]:
    return {event["round"]: event["contributors"] for event in peer.of_kind("round")}


THREES = replace(SLOW, group_size=3)
ROUNDS = 4


@pytest.mark.usefixtures("brief_end")
@pytest.mark.parametrize(("plan", "peers"), [(SLOW, "abcd"), (NOLOCO, "abcde"), (THREES, "abcd")])
async def test_a_link_cut_for_good_costs_the_pair_one_round(plan, peers):
    """From then on each meets others: nobody waits, and nobody sits out who would not anyway."""
    async with Swarm(steady(ROUNDS * plan.inner_steps, plan), peers) as swarm:
        pair: list[str] = []

        def cut(said: GossipMessage) -> None:
            pair.extend((said.speaker, said.listener))
            swarm.cut(*pair)

        swarm.tap = first(in_round(swarm, 1, "contribution frame"), cut)
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


def cuts_known_to(peer: Peer) -> dict[object, object]:
    """As `murmur status` shows them: whom each member does not reach, of those that name any."""
    return {m["peer"]: m["unreachable"] for m in peer.members if "unreachable" in m}


@pytest.mark.usefixtures("brief_end")
async def test_a_link_that_heals_is_used_again():
    async with Swarm(steady(140, SLOW), "abcd") as swarm:
        swarm.cut("a", "b")
        await swarm.until(lambda: cuts_known_to(swarm["c"]) == {"a": ["b"], "b": ["a"]}, 20)
        await swarm.sleep(12)  # a round goes around it
        swarm.heal("a", "b")
        told: list[GossipMessage] = []
        swarm.tap = meetings(told.append)
        await swarm.finished()
        assert [event["peers"] for event in swarm["b"].of_kind("unreachable")] == [["a"], []]
        assert ("a", "b") in {(said.speaker, said.listener) for said in told}
        assert all(failures_of(peer) == [] for peer in swarm.alive)
