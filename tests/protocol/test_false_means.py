"""A peer that falsifies means is caught, named and passed over, and no other."""

import itertools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce import checks, reducer
from murmuration.worker.exchange.allreduce.checks import Checks
from murmuration.worker.exchange.allreduce.closing import DueMean
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.mean import reduce
from murmuration.worker.exchange.allreduce.reducer import Reducer, Refusal
from murmuration.worker.exchange.round_context import Context, RoundConfig
from murmuration.worker.exchange.view import ShardKey
from tests.protocol.problem import Problem
from tests.protocol.swarm import NearSwarm, Peer, Swarm
from tests.support.false_means import (
    LIES,
    closing_falsely,
    contributing,
    next_to_nothing,
    only_itself,
    reducing_falsely,
    showing,
)
from tests.support.liar import with_ghosts

LONG = Problem(steps=600)


def few_bits(preset: str) -> Problem:
    """In short rounds of one fragment."""
    plan = replace(PRESETS[preset], inner_steps=3, fragments=1, overlap_steps=0)
    return replace(LONG, layers=(4 * 4096,), plan=plan)


def named(peer: Peer) -> list[str]:
    """The peers that this one has caught."""
    return [text.split()[0] for text in peer.warnings if "gave a false mean" in text]


async def named_by_all(
    attack: AbstractContextManager[Any], rounds: int, problem: Problem = LONG
) -> torch.Tensor:
    """Four peers, of which d attacks, go through so many rounds, at their usual pace. Returns the
    anchor that the others have."""
    async with Swarm(problem, "abcd") as swarm:
        with attack:
            honest = [swarm[name] for name in "abc"]
            await swarm.until(lambda: all(p.versions >= (rounds,) for p in honest), rounds)
        assert [named(peer) for peer in honest] == [["d"]] * 3
        assert swarm.agrees(*"abc")
        assert "d gave a false mean" in str(honest[0].node.status()["warnings"])
        return honest[0].trainer.states[0].anchor


@pytest.mark.parametrize("lie", ["1e4", "-20 times"])
async def test_a_mean_that_is_larger_than_all_contributions_is_not_applied(lie):
    anchor = await named_by_all(reducing_falsely("d", LIES[lie]), 3)
    expected = LONG.reference("abc")["a"][0].anchor
    assert torch.dist(anchor, expected) < torch.linalg.vector_norm(expected)


async def test_gradients_that_are_far_too_large_are_left_out_from_the_third_step_on():
    problem = replace(LONG, plan=PRESETS["ddp"], steps=40)
    with contributing("d", -1e4):
        async with Swarm(problem, "abcd") as swarm:
            await swarm.finished()
    expected, peers = problem.reference("abc")["a"][0].anchor, [swarm[name] for name in "abc"]
    for peer in peers:
        assert torch.dist(peer.trainer.states[0].anchor, expected) < expected.norm() / 4
        assert peer.warned("d is in quarantine")


@pytest.mark.parametrize(
    ("names", "rounds", "counted"),
    [
        ("abcd", RoundConfig(), 3),
        ("abcd", RoundConfig(norm_limit=0.0), 4),
        ("abd", RoundConfig(aggregation="trimmed"), 2),
    ],
)
async def test_what_a_peer_turns_is_left_out_of_four_or_where_not_all_trust(names, rounds, counted):
    problem = replace(LONG, layers=(2**17,), rounds=rounds)
    async with NearSwarm(problem, names) as swarm:
        with contributing("d", -1.2, 1.2):
            honest = [swarm[name] for name in names[:-1]]
            await swarm.until(lambda: all(p.versions >= (12,) for p in honest), 12)
        told = [text for peer in honest for text in peer.warnings]
        start = r"d has pointed against the others up to shard \d of round [46] "
        assert [bool(re.match(start, text)) for text in told] == [True] * len(honest)
        assert honest[0].of_kind("round")[-1]["contributors"] == counted


@pytest.mark.parametrize("lie", ["turned", "zero", "1 % more"])
async def test_another_mean_is_seen_by_everybody_after_the_first_lie(lie):
    await named_by_all(reducing_falsely("d", LIES[lie]), 4)


@pytest.mark.parametrize(
    "attack",
    [
        partial(closing_falsely, "d", only_itself),
        partial(closing_falsely, "d", next_to_nothing),
        partial(reducing_falsely, "d", LIES["turned"], ghost="ghost"),
    ],
    ids=["counts only itself", "counts next to nothing", "names a ghost"],
)
async def test_a_mean_of_others_than_have_contributed_is_seen(attack):
    """In the third such round: once, what others have told may be what differs."""
    await named_by_all(attack(), 6)


async def test_a_mean_of_its_reducer_alone_goes_to_another_before_it_is_applied():
    with contributing("d", -2.9, 2.9):
        anchor = await named_by_all(closing_falsely("d", only_itself), 8)
    expected = LONG.reference("abc")["a"][0].anchor
    assert torch.dist(anchor, expected) < torch.linalg.vector_norm(expected) / 4


@pytest.mark.parametrize(
    ("factor", "more", "how"),
    [
        (-3.5, 1.45, ()),
        (-1.4, 1.45, ("apart",)),
        (-4, 1, ("own",)),
        (-60, 1, ("own",)),
        (1, 0.1, ()),
    ],
)
async def test_nobody_contributes_more_than_it_announces(factor, more, how):
    async with Swarm(LONG, "abcd") as swarm:
        with contributing("d", factor, more, **dict.fromkeys(how, True)):
            honest = [swarm[name] for name in "abc"]
            await swarm.until(lambda: min(p.versions for p in honest) >= (20,), 60)
            await swarm.until(lambda: sum("d" in p.node.gossip.me.idle for p in honest) > 1, 1)
        assert {*itertools.chain(*map(named, honest))} <= {"d"}
        assert "apart" not in how or honest[0].of_kind("round")[0]["contributors"] == 4
        expected, anchor = LONG.reference("abc")["a"][0].anchor, honest[0].trainer.states[0].anchor
        assert torch.dist(anchor, expected) < torch.linalg.vector_norm(expected) / 4


def consistent(before: list[torch.Tensor], of_lie: torch.Tensor) -> list[torch.Tensor]:
    return [*before, of_lie]


def boundless(_: list[torch.Tensor], of_lie: torch.Tensor) -> list[torch.Tensor]:
    """Always the same, of which the squares are infinite."""
    return [1e30 * torch.randn(of_lie.shape, generator=torch.Generator().manual_seed(5))] * 2


STREAMING = [("streaming", lie, said) for lie in ("1e4", "1 % more") for said in (None, consistent)]
ONEBIT = [("onebit", "1e4", None), ("onebit", "turned", consistent), ("onebit", "zero", boundless)]
SPARSE = [("sparse", "1e4", None), ("sparse", "stale", None), ("sparse", "turned", consistent)]


@pytest.mark.parametrize(("preset", "lie", "leaving"), [*STREAMING, *ONEBIT, *SPARSE])
async def test_few_bits_hide_no_lie(preset, lie, leaving):
    """Whatever the liar says that it has left over. A first mean has a limit, too."""
    with patch.object(checks, "_SHARE", 10.0):  # how often it checks is not the matter
        attack = reducing_falsely("d", LIES[lie], leaving=leaving)
        assert float((await named_by_all(attack, 8, few_bits(preset))).abs().max()) < 100


@pytest.mark.parametrize("preset", ["streaming", "onebit"])
async def test_what_was_left_over_cannot_be_invented(preset):
    """An honest mean of the contributions and of what no mean before has left over."""

    async def invented(
        context: Context, due: DueMean, before: torch.Tensor | None, *known: Any
    ) -> Any:
        if context.me == "d" and before is not None:
            before, known = torch.full_like(before, 0.01), ()
        return await reduce(context, due, before, *known)

    await named_by_all(patch.object(reducer, "reduce", invented), 8, few_bits(preset))


async def test_one_that_sees_a_false_mean_shows_it_to_the_others():
    """Only a draws by itself; the others look where it tells them to, and believe what they see."""
    draw = Checks._draw

    def drawn(self: Checks, *given: Any) -> Sequence[Any]:
        return draw(self, *given) if self._context.me == "a" else []

    with patch.object(Checks, "_draw", drawn):
        await named_by_all(reducing_falsely("d", LIES["zero"]), 4)


def hiding_its_own() -> AbstractContextManager[Any]:
    """As long as this lasts, d shows what it gave to others, and not what it gave to itself."""
    shown = Checks._shown

    def of_others(self: Checks, key: ShardKey, *asked: Any) -> Any:
        hides = self._context.me == "d" and key in self._shards.closed
        return None if hides else shown(self, key, *asked)

    return patch.object(Checks, "_shown", of_others)


async def test_one_that_shows_what_it_did_not_contribute_is_named_and_no_reducer():
    await named_by_all(showing("d", pb.CheckedLeaf(payload=bytes(256))), 4)


@pytest.mark.parametrize(
    ("hiding", "rounds"),
    [
        (partial(showing, "d", pb.CheckedLeaf()), 6),
        (partial(showing, "d", pb.CheckedLeaf(), after_s=1.0), 8),
        (partial(showing, "d", pb.CheckedLeaf(), after_s=1000.0), 16),
        (hiding_its_own, 6),
    ],
    ids=["at once", "in a later round", "never", "its own"],
)
async def test_a_false_mean_is_not_hidden_by_showing_nothing(hiding, rounds):
    with hiding():
        await named_by_all(reducing_falsely("d", LIES["turned"]), rounds)


async def test_one_that_asks_late_names_nobody():
    """Its link is so slow that the others are in the next round when it has a mean."""
    problem = replace(LONG, layers=(40_000,), rounds=RoundConfig(floor_mbps=0.1))
    async with Swarm(replace(problem, plan=Plan(inner_steps=5)), "abcd") as swarm:
        await swarm.sleep(5)
        swarm.links_mbps["d"] = 0.3
        await swarm.sleep(20)
        assert [named(peer) for peer in swarm.alive] == [[]] * 4


def misstated(due: DueMean, _: str) -> DueMean:
    """The first of the contributors is said to have contributed something else."""
    return replace(due, roots=(bytes(16), *due.roots[1:]))


def zero_for_one() -> AbstractContextManager[Any]:
    """As long as this lasts, d gives a another mean than the others."""
    ask = Contributor._ask

    async def asked(self: Contributor, round_: Any, part: Any, *args: Any) -> Any:
        answer = await ask(self, round_, part, *args)
        if (self._context.me, part.target) != ("a", "d") or not isinstance(answer, wire.Reduction):
            return answer
        zeros = torch.zeros(part.shard.stop - part.shard.start)
        payload = wire.Payload.of(wire.encode(self._context.reduction_codec, zeros))
        return wire.Reduction(replace(answer.header, hash=payload.hash), payload)

    return patch.object(Contributor, "_ask", asked)


@pytest.mark.parametrize(
    ("deceiving", "parted_s"),
    [(partial(closing_falsely, "d", misstated), 0), (zero_for_one, 0), (zero_for_one, 20)],
    ids=["of its contribution", "by another mean", "by another mean, unchecked"],
)
async def test_a_reducer_that_deceives_one_is_named_by_that_one_and_slows_nobody(
    deceiving, parted_s
):
    """Neither of the two reduces for the other any more. What no check looks at parts the states,
    three times in a row; so it does when the first mark ends."""
    async with Swarm(LONG, "abcd") as swarm:
        first, drawn = swarm["a"], (lambda *_: []) if parted_s else Checks._draw
        await swarm.until(lambda: first.versions >= (6,), 10)
        with deceiving(), patch.object(Checks, "_draw", drawn):
            await swarm.until(lambda: bool(named(first)), 10)
            await swarm.sleep(parted_s)
            (before,) = first.versions
            await swarm.sleep(5)
            assert first.versions >= (before + 13,)  # 14 where nobody deceives
        assert [named(swarm[name]) for name in "abcd"] == [["d"], [], [], []]
        assert len(first.of_kind("adopted")) <= 8
        assert not any(peer.warned("in vain") for peer in swarm.alive)


@pytest.mark.parametrize(("given", "seen_by"), [("abcd", "abc"), ("bd", "ac")])
async def test_one_that_lies_in_the_name_of_another_is_avoided(given, seen_by, monkeypatch):
    """No check looks at such a mean. Nobody is named, nor is b, which alone may pass it on."""
    answered = Reducer._answer

    def answer(self: Reducer, offer: Any, what: Any) -> None:
        hides = self._context.me == "d" and offer.header.sender not in given
        answered(self, offer, Refusal("pruned", "it is over") if hides else what)

    monkeypatch.setattr(Reducer, "_answer", answer)
    async with Swarm(LONG, "abcd") as swarm:
        seeing = [swarm[name] for name in seen_by]
        with reducing_falsely("d", LIES["turned"], by="b"):
            await swarm.until(lambda: all("d" in p.node.gossip.me.idle for p in seeing), 15)
            assert [named(peer) for peer in swarm.alive] == [[]] * 4
        assert not any("b" in peer.node.gossip.me.idle for peer in swarm.alive)


async def test_a_false_hint_costs_a_look_and_invented_ones_nothing():
    async with Swarm(LONG, "abcd") as swarm:
        await swarm.until(lambda: swarm["a"].versions >= (3,), 10)
        (version,) = swarm["a"].versions
        hint = pb.CheckRequest(
            run=LONG.manifest.run, sender="d", round=version - 1, hint=True,
            leaves=[pb.CheckRequest.Leaf(shard=shard) for shard in range(4)],
        )  # fmt: skip
        invented = [pb.CheckRequest(round=9_999 + n) for n in range(20)]
        for each in invented:
            each.MergeFrom(pb.CheckRequest(run=hint.run, sender="d", hint=True))
            each.leaves.extend(hint.leaves)
        other = pb.CheckRequest.FromString(hint.SerializeToString())
        other.sender = "c"  # which is heard, too
        (reducer, *_) = swarm["a"].node._reducers
        for name, told in [*itertools.product("abc", [hint, *invented]), ("a", hint), ("a", other)]:
            stream = swarm["d"].transport.open(name, "Data/Exchange")
            told.round = max(told.round, swarm["a"].versions[0] - 1)
            await stream.send(pb.ExchangeUp(check=told).SerializeToString())
            assert await stream.receive() is None
            assert len(reducer.checks._hints) <= 4
        assert {*itertools.chain(*reducer.checks._hints.values())} == {"c", "d"}
        await swarm.until(lambda: swarm["a"].versions >= (6,), 10)
        assert [named(swarm[name]) for name in "abcd"] == [[]] * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda due, _: replace(due, joiners=() if due.key.round % 4 == due.key.shard else ("g",)),
        lambda due, _: replace(due, joiners=("e", "f", "g", "h", "i")),
        lambda due, _: replace(due, joiners=("e", "e")),
        lambda due, _: replace(due, last="e"),
        lambda due, _: replace(due, roots=due.roots[1:]),
    ],
    ids=["joiners elsewhere", "too many joiners", "one twice", "who came last", "roots"],
)
async def test_what_no_reducer_says_of_its_mean_names_it_at_once(change):
    await named_by_all(closing_falsely("d", change), 2)


async def test_a_liar_that_names_ghosts_slows_nobody():
    async with Swarm(replace(LONG, plan=Plan(inner_steps=5), steps=1_000_000), "abcd") as swarm:
        first = swarm["a"]
        await swarm.until(lambda: min(first.versions) >= 3, 60)
        before = min(first.versions)
        with closing_falsely("d", with_ghosts):
            await swarm.sleep(8)
        assert min(first.versions) >= before + 0.9 * 8 / 0.55
        assert set("abcd") <= set(first.trainer.states[0].group)
        assert len(first.trainer.states[0].group) <= 8
        await swarm.join("e", via="a")
        await swarm.until(lambda: "e" in first.trainer.states[0].group, 20)


async def test_checks_take_little_of_the_link_and_name_nobody_who_is_honest():
    problem = replace(LONG, layers=(200_000,), plan=Plan(inner_steps=3), steps=12)
    async with Swarm(problem, "abcd") as swarm:
        await swarm.ends_equal()
        for peer in swarm.alive:
            assert named(peer) == []
            counts = peer.node.context.counts
            assert 0 < counts.checked_bytes < 0.03 * counts.payload_sent_bytes


@pytest.mark.parametrize("preset", ["streaming", "onebit", "sparse"])
async def test_what_earlier_means_left_names_nobody_when_all_come_to_rest(preset):
    async with Swarm(few_bits(preset), "abcd") as swarm:
        await swarm.until(lambda: swarm["a"].versions >= (6,), 10)
        for peer in swarm.alive:
            peer.replica.moves_until = 0
        await swarm.until(lambda: swarm["a"].versions >= (24,), 60)
        assert [named(peer) for peer in swarm.alive] == [[]] * 4


@pytest.mark.parametrize("scale", [1, 1e-24])
@pytest.mark.parametrize("elements", [1, 64, 65, 700, 20_000])
def test_every_leaf_leads_to_the_root_and_no_other_bytes_do(elements, scale):
    codec = codec_by_name("fp32")
    leaves = wire.Leaves.of(elements, [codec])
    payload = wire.encode(codec, values := scale * torch.randn(elements))
    for norms in ((), (float(values.norm()), 0.0)):
        commitment = wire.Commitment(codec, leaves, payload, 3, norms)
        for leaf in range(leaves.count):
            shown, path = commitment.shown(leaf)
            found = partial(wire.root_of, codec, leaves)
            assert found(leaf, shown, path, 3, norms) == commitment.root
            assert found(leaf, shown, path, 4, norms) != commitment.root
            assert found(leaf, shown, path, 3, (20.0, 0.0)) != commitment.root
            assert found(leaf, bytes(len(shown)), path, 3, norms) != commitment.root
            fits = not norms or scale < 1  # so little may be 0 in fp32
            assert found(leaf, shown, path, 3, norms, 1) == (commitment.root if fits else b"")
            longer = [*path, path[0] if path else shown]
            assert found(leaf, shown, longer, 3, norms) == b""
            if leaf ^ 1 < leaves.count:
                assert found(leaf ^ 1, shown, path, 3, norms) != commitment.root
