"""The pass that ends a run in pairs, or one whose replicas keep what was not sent. One anchor
for all that can be in it, and in bounded time. A step takes half a second, a round two and a
half."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.codecs import bits_per_value
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.final_average import FinalAverage
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.training.mailbox import Begin, RoundFailed
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.support.false_means import LIES, reducing_falsely
from tests.support.liar import lies_at_the_end

NOLOCO = replace(PRESETS["noloco"], inner_steps=5)
STREAMING = replace(
    PRESETS["streaming-noloco"], inner_steps=6, fragments=2, overlap_steps=3, codec="bf16"
)
KEEP = Plan(inner_steps=5, codec="sign", reduction_codec="sign", merge="keep", consensus=True)
_NAMED = {
    "noloco": NOLOCO,
    "streaming-noloco": STREAMING,
    "keep": KEEP,
    "keep, streaming": replace(KEEP, inner_steps=6, fragments=2, overlap_steps=3),
    "keep in pairs": replace(NOLOCO, codec="sign", merge="keep"),
}
# Under faults: both kinds of exchange, one fragment and two.
TWO = _NAMED["keep, streaming"]
STEPS = 30
LAST_S = 0.5 * STEPS
MOST_S = 60.0  # for a death to be noticed, and one more try


def steady(plan: Plan = NOLOCO, seed: int = 0, **step_s: float) -> Problem:
    times = {**dict.fromkeys("abcde", 0.5), **step_s}
    return Problem(layers=(300, 200), plan=plan, steps=STEPS, step_s=times, seed=seed)


def watch(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[Contributor | FinalAverage, Begin], None]
) -> None:
    """Notes whenever a peer comes to the pass over a fragment."""
    begin, begin_of_pairs = Contributor.begin, FinalAverage.begin

    async def noted(self: Contributor, message: Begin) -> None:
        if message.everyone:
            note(self, message)
        await begin(self, message)

    async def of_pairs(self: FinalAverage, message: Begin) -> None:
        note(self, message)
        await begin_of_pairs(self, message)

    monkeypatch.setattr(FinalAverage, "begin", of_pairs)
    monkeypatch.setattr(Contributor, "begin", noted)


def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has come to the pass, once for each fragment; filled as they do."""
    names: list[str] = []
    watch(monkeypatch, lambda rounds, _: names.append(rounds._context.me))
    return names


def last_of(peer: Peer) -> object:
    """The number of contributors of the peer's last round."""
    return peer.of_kind("round")[-1]["contributors"]


@pytest.mark.parametrize(
    ("plan", "peers"),
    [*((plan, 3) for plan in _NAMED.values()), (NOLOCO, 2)],
    ids=[*_NAMED, "noloco, of two"],
)
async def test_all_end_with_the_mean_of_all_anchors(plan, peers):
    async with Swarm(steady(plan), "abcde"[:peers]) as swarm:
        await swarm.ends_at_reference()
        swarm.assert_equal()
        assert {last_of(peer) for peer in swarm.alive} == {peers}
        assert swarm.loop.time() < LAST_S + 5
        counts = [peer.node.context.counts for peer in swarm.alive]
        sent = [each.final_mean_sent.payload_bytes for each in counts]
        elements = sum(swarm["a"].node.context.elements)
        assert sum(sent) == pytest.approx(2 * (peers - 1) * 4 * elements)
        for peer, each in zip(swarm.alive, counts, strict=True):
            flow, metrics = each.contributions_sent, peer.trainer.metrics
            if plan.exchange == "mean":  # rounds of pairs carry anchors, too
                bits = 8 * flow.encoded_bytes / flow.values
                assert bits == pytest.approx(bits_per_value(plan.codec))
            assert metrics.final_mean_rounds == plan.fragments
            assert 0 < metrics.final_mean_stall_s <= metrics.stall_s


@pytest.mark.parametrize("lie", [lambda own: -20 * own, lambda own: own + 1e4, None])
@pytest.mark.parametrize("plan", [NOLOCO, STREAMING], ids=["noloco", "streaming-noloco"])
async def test_the_last_mean_is_of_models_that_are_near(plan, lie):
    """`d` gives another model than its own, or (None) a false mean of all."""
    expected = steady(plan).reference("abcd")["a"]
    with nullcontext() if lie else reducing_falsely("d", LIES["-20 times"]):
        async with Swarm(steady(plan), "abcd") as swarm:
            if lie:
                lies_at_the_end(swarm["d"].node, lie)
            await swarm.until(lambda: all(swarm[name].done for name in "abcd"), 200)
            texts = [event["text"] for event in swarm["d"].of_kind("warning")]
    assert any("the mean that ends the run has 1 of 4 peers" in text for text in texts) == bool(lie)
    assert swarm.agrees(*"abc")
    for state, outer in zip(swarm["a"].trainer.states, expected, strict=True):
        assert torch.dist(state.anchor, outer.anchor) < outer.anchor.norm() / 4


@pytest.mark.parametrize(("plan", "at_s"), [(TWO, 2.2), (NOLOCO, 14.3)], ids=["early", "late"])
async def test_a_late_joiner_is_in_the_mean(plan, at_s):
    async with Swarm(steady(plan), "abc") as swarm:
        await swarm.sleep(at_s)
        await swarm.join("d", via="a")
        await swarm.ends_equal()
        assert {last_of(peer) for peer in swarm.alive} == {4}
        assert swarm.loop.time() < LAST_S + MOST_S


async def test_joiners_agree_when_all_who_began_the_run_are_gone():
    async with Swarm(steady(STREAMING), "ab") as swarm:
        await swarm.sleep(2)
        await swarm.join("c", via="a")
        await swarm.join("d", via="a")
        await swarm.sleep(2)
        swarm.kill("a")
        swarm.kill("b")
        await swarm.ends_equal()
        assert {last_of(peer) for peer in swarm.alive} == {2}


@pytest.mark.parametrize(("plan", "after_s"), [(NOLOCO, 0.0), (TWO, 5.0)], ids=["at", "after"])
async def test_who_joins_at_the_very_end_takes_the_mean(plan, after_s):
    async with Swarm(steady(plan), "abc") as swarm:
        await swarm.until(lambda: swarm["a"].trainer.step == STEPS, LAST_S + 5)
        await swarm.sleep(after_s)
        await swarm.join("d", via="a")
        await swarm.ends_equal()
        assert last_of(swarm["a"]) in (3, 4)
        assert swarm.loop.time() < LAST_S + MOST_S


@pytest.mark.parametrize(("plan", "before_s"), [(NOLOCO, 0.05), (TWO, 6.0)], ids=["late", "early"])
async def test_who_is_killed_before_the_end_is_not_in_the_mean(plan, before_s):
    async with Swarm(steady(plan), "abcd") as swarm:
        await swarm.sleep(LAST_S - before_s)
        swarm.kill("d")
        await swarm.ends_equal()
        assert {last_of(peer) for peer in swarm.alive} == {3}
        assert swarm.loop.time() < LAST_S + MOST_S


@pytest.mark.parametrize(
    ("plan", "nth", "fault"),
    [(NOLOCO, 4, "frozen"), (TWO, 1, "frozen"), (NOLOCO, 1, "killed")],
    ids=["last frozen", "first frozen", "first killed"],
)
async def test_a_fault_amid_the_pass_holds_the_others_up_for_a_moment(
    plan, nth, fault, monkeypatch
):
    """It happens to whoever is the n-th to come to the pass, as soon as it has."""
    async with Swarm(steady(plan), "abcd") as swarm:
        names = begun(monkeypatch)
        await swarm.until(lambda: len(dict.fromkeys(names)) >= nth, 60)
        victim = list(dict.fromkeys(names))[nth - 1]
        if fault == "killed":
            swarm.kill(victim)
        else:
            swarm.freeze(victim)
        others = [peer for peer in swarm.alive if peer.name != victim]
        await swarm.until(lambda: all(last_of(peer) in (3, 4) for peer in others), MOST_S)
        if fault == "frozen":
            swarm.thaw(victim)
        await swarm.ends_equal()


@pytest.mark.parametrize(
    ("plan", "at_s", "frozen_s"),
    [(TWO, 9.0, 15.0), (NOLOCO, 13.0, 40.0)],
    ids=["until the end", "beyond it"],
)
async def test_who_was_frozen_takes_what_the_others_have_agreed_on(plan, at_s, frozen_s):
    async with Swarm(steady(plan), "abcd") as swarm:
        await swarm.sleep(at_s)
        swarm.freeze("d")
        await swarm.sleep(frozen_s)
        swarm.thaw("d")
        await swarm.ends_equal()
        for state in swarm["d"].trainer.states:
            assert torch.isfinite(state.anchor).all()


@pytest.mark.parametrize(("plan", "healed"), [(NOLOCO, False), (KEEP, True)], ids=["cut", "healed"])
async def test_a_link_that_is_cut_in_the_end_leaves_one_anchor(plan, healed):
    """Two that cannot reach each other, but others who can reach both."""
    async with Swarm(steady(plan), "abcd") as swarm:
        await swarm.sleep(LAST_S - 0.2)
        swarm.cut("a", "b")
        await swarm.sleep(8)
        if healed:
            swarm.heal("a", "b")
        await swarm.ends_equal()
        assert {last_of(peer) for peer in swarm.alive} == {4}
        assert swarm.loop.time() < LAST_S + MOST_S


@pytest.mark.parametrize("plan", [NOLOCO, KEEP], ids=["noloco", "keep"])
async def test_a_swarm_that_is_cut_in_two_ends_with_one_anchor_in_each_half(plan):
    async with Swarm(steady(plan), "abcde") as swarm:
        await swarm.sleep(LAST_S - 1)
        swarm.cut("ab", "cde")
        await swarm.finished()
        for half in ("ab", "cde"):
            assert {last_of(swarm[name]) for name in half} == {len(half)}
            assert len({swarm[name].outer_hash for name in half}) == 1
        assert swarm.loop.time() < LAST_S + MOST_S


SIX = {
    "keep": replace(KEEP, inner_steps=6, fragments=6, overlap_steps=3),
    "pairs": replace(STREAMING, fragments=6),
}


@pytest.mark.parametrize("plan", SIX.values(), ids=SIX)
async def test_two_fragments_at_a_time_in_the_same_order_everywhere(plan, monkeypatch):
    problem = replace(steady(plan), layers=(300, 200, 100, 100, 50, 50), steps=18)
    async with Swarm(problem, "abc") as swarm:
        orders: dict[str, dict[int, None]] = {name: {} for name in "abc"}
        most = 0

        def note(rounds: Contributor | FinalAverage, begin: Begin) -> None:
            nonlocal most
            me = rounds._context.me
            orders[me].setdefault(begin.fragment)
            in_flight = [each.in_flight for each in swarm[me].trainer.fragments]
            most = max(most, sum(sent is not None and sent.everyone for sent in in_flight))

        watch(monkeypatch, note)
        await swarm.ends_at_reference()
        assert set(map(tuple, orders.values())) == {(0, 1, 2, 3, 4, 5)}
        assert most == 2


async def test_a_fragment_whose_round_fails_at_a_peer_does_not_keep_it_from_the_rest(monkeypatch):
    begin = Contributor.begin

    async def failing(self: Contributor, message: Begin) -> None:
        if message.everyone and (self._context.me, message.fragment) == ("a", 1):
            self._results.finished(RoundFailed(1, message.round, "a test", ()))
        else:
            await begin(self, message)

    problem = replace(steady(SIX["keep"]), layers=(300, 200, 100, 100, 50, 50), steps=18)
    async with Swarm(problem, "abc") as swarm:
        monkeypatch.setattr(Contributor, "begin", failing)
        await swarm.ends_equal()
        contributors = [state.contributors for state in swarm["a"].trainer.states]
        assert contributors == [3, 2, 3, 3, 3, 3]
        assert swarm.loop.time() < LAST_S + MOST_S


async def test_a_slow_peer_is_waited_for_as_long_as_the_grace_lasts():
    problem = steady(replace(NOLOCO, inner_steps=15), d=0.9)
    async with Swarm(problem, "abcd") as swarm:
        await swarm.ends_equal()
        assert {last_of(peer) for peer in swarm.alive} == {4}


# d meets another in each round; or one other only, so that neither has had a round.
@pytest.mark.parametrize(("seed", "agree"), [(2, 3), (4, 2)])
async def test_who_comes_after_the_grace_takes_the_others_mean(seed, agree):
    problem = steady(replace(NOLOCO, inner_steps=15), seed=seed, d=0.9)
    async with Swarm(replace(problem, rounds=RoundConfig(grace_s=5.0)), "abcd") as swarm:
        await swarm.ends_equal()
        rounds = [peer.of_kind("round") for peer in swarm.alive if peer.name != "d"]
        last = [each[-1] for each in rounds if each]
        assert [each["contributors"] for each in last] == [agree] * agree
        assert [e["rounds_given_up"] for e in swarm["d"].of_kind("adopted")] == [0]
        # Its grace, and the second by which d's last partner had looked out for its anchor.
        assert max(each["stall_s"] for each in last) < 6.5
