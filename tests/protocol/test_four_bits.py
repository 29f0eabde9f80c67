"""The mean travels in four bits both ways, a whole model in pieces. No more of a peer's
contribution gets in than the norm limit lets."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.measured import ExchangeConfig
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.training.mailbox import Begin, Mailbox, RoundDone, ToIO, ToTrain
from murmuration.worker.wire import Payload, hash64
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, once
from tests.protocol.virtual_time import run
from tests.support.liar import Lie, lies_at_the_end

NAMES = "abc"


def problem(compression: str, elements: int = 60_000) -> Problem:
    return Problem(
        layers=(elements, elements // 2),
        steps=6,
        plan=Plan(inner_steps=3, fragments=2, codec="e3m0", reduction_codec="e3m0"),
        exchange=ExchangeConfig(compression=compression),
    )


def test_four_bits_are_four_bits_on_the_wire_and_fewer_when_compressed():
    async def scenario(compression: str) -> list[tuple[float, ...]]:
        async with Swarm(problem(compression), NAMES) as swarm:
            await swarm.ends_at_reference()
            found = []
            for peer in swarm.alive:
                counts = peer.node.context.counts
                sent, back = counts.contributions_sent, counts.reductions_sent
                assert counts.payload_sent_bytes == sent.payload_bytes + back.payload_bytes
                # Of three peers each sends two thirds, and each reduction to two.
                values = sum(e * peer.versions[i] for i, e in enumerate((60_000, 30_000)))
                assert sent.values == pytest.approx(values * 2 / 3, rel=0.02)
                assert back.values == pytest.approx(values * 2 / 3, rel=0.02)
                found.append(
                    (
                        8 * sent.payload_bytes / sent.values,
                        8 * sent.encoded_bytes / sent.values,
                        8 * back.payload_bytes / back.values,
                    )
                )
            return found

    for travelled, encoded, back in run(scenario("never")):
        assert 4.0 < travelled == encoded <= 4.3
        assert 4.0 < back <= 4.3
    for travelled, encoded, back in run(scenario("always")):
        assert encoded <= 4.3
        assert travelled < 4.0
        assert back < 4.0


async def test_peers_need_not_agree_on_compressing():
    shared = problem("never", elements=5_000)
    async with Swarm(shared) as swarm:
        for name, mode in zip(NAMES, ("always", "never", "auto"), strict=True):
            own = replace(shared, exchange=ExchangeConfig(compression=mode))
            via = [other for other in NAMES if other != name]
            await swarm.join(name, via=via, min_peers=3, problem=own)
        await swarm.ends_at_reference()


def other_values(frame: pb.Frame) -> pb.Frame:
    """A sound frame of the right size that is not what was announced."""
    packed = Payload.of(memoryview(bytes(frame.raw_bytes)), compress=True).packed[0]
    assert packed is not None
    return rehashed(frame, packed)


def flipped_bit(frame: pb.Frame) -> pb.Frame:
    changed = rehashed(frame, bytes([frame.payload[0] ^ 1]) + frame.payload[1:])
    changed.hash = frame.hash
    return changed


def rehashed(frame: pb.Frame, payload: bytes) -> pb.Frame:
    return pb.Frame(
        offset=frame.offset, payload=payload, hash=hash64(payload), raw_bytes=frame.raw_bytes
    )


@pytest.mark.parametrize(
    ("damage", "up"),
    [(flipped_bit, True), (other_values, True), (other_values, False)],
    ids=lambda value: getattr(value, "__name__", "up" if value else "back"),
)
async def test_a_compressed_frame_damaged_on_the_way_is_sent_again(damage, up):
    kind = pb.ExchangeUp if up else pb.ExchangeDown
    spoiled = []

    def spoil(passing: Passing) -> bytes:
        message = kind.FromString(passing.message)
        assert message.frame.raw_bytes > 0  # it is a compressed one
        spoiled.append(passing)
        message.frame.CopyFrom(damage(message.frame))
        return message.SerializeToString()

    async with Swarm(problem("always", elements=5_000), NAMES) as swarm:
        swarm.tap = once(lambda p: p.up == up and p.body == "frame", spoil)
        await swarm.finished()
        assert len(spoiled) == 1
        swarm.assert_reference()
        assert sum(sum(peer.refused.values()) for peer in swarm.alive) == int(up)
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []


LAYERS = (300, 200, 150, 260, 90)
PROBLEM = Problem(layers=LAYERS, steps=8, plan=replace(PRESETS["diloco"], inner_steps=3))


async def _anchors() -> list[torch.Tensor]:
    async with Swarm(PROBLEM, "abc") as swarm:
        await swarm.ends_equal()
        states = swarm["a"].trainer.states
        return list(torch.cat([state.anchor for state in states]).split(LAYERS))


def test_a_run_in_pieces_ends_with_the_bits_of_one_in_one(monkeypatch):
    whole: list[torch.Tensor] = []
    pieces: list[torch.Tensor] = []
    under_way, most = Counter[int](), Counter[int]()
    post, answer = Mailbox.post, Mailbox.answer

    def posted(mailbox: Mailbox, message: ToIO) -> None:
        under_way[id(mailbox)] += isinstance(message, Begin)
        most[id(mailbox)] = max(most[id(mailbox)], under_way[id(mailbox)])
        post(mailbox, message)

    def answered(mailbox: Mailbox, message: ToTrain) -> None:
        under_way[id(mailbox)] -= isinstance(message, RoundDone)
        answer(mailbox, message)

    async def in_one() -> None:
        whole.extend(await _anchors())

    async def in_pieces() -> None:
        pieces.extend(await _anchors())

    run(in_one())
    monkeypatch.setattr("murmuration.algorithms.fragments.PIECE_ELEMENTS", 350)
    monkeypatch.setattr(Mailbox, "post", posted)
    monkeypatch.setattr(Mailbox, "answer", answered)
    assert len(PROBLEM.fragments) == 3
    run(in_pieces())
    assert all(torch.equal(*pair) for pair in zip(whole, pieces, strict=True))
    assert set(most.values()) == {2}  # a third would only take memory


FAR = Problem(steps=6, far={"d": 40.0})


KEEP = Plan(inner_steps=3, codec="sign", reduction_codec="sign", merge="keep")


@pytest.mark.parametrize("plan", [FAR.plan, KEEP], ids=["reset", "keep"])
async def test_a_norm_above_the_limit_counts_as_the_reference_says(plan):
    async with Swarm(replace(FAR, plan=plan), "abcd") as swarm:
        await swarm.ends_at_reference()
        told = swarm["d"].warnings
        rest = "is kept for later rounds" if plan.keeps else "is lost"
        assert any("of what this peer contributed" in str(t) and rest in str(t) for t in told)


FOUR_BITS = replace(KEEP, codec="e3m0", reduction_codec="e3m0")
EXACT = replace(KEEP, codec="fp32", reduction_codec="fp32")


@pytest.mark.parametrize(
    ("plan", "most"), [(KEEP, 0.3), (FOUR_BITS, 0.05), (EXACT, 0.0)], ids=["sign", "e3m0", "fp32"]
)
def test_the_last_mean_moves_no_further_than_a_round(plan, most):
    """It is of what all have learned since their one anchor, and not of whole models."""

    async def anchor_of(lie: Lie | None) -> torch.Tensor:
        async with Swarm(Problem(steps=9, plan=replace(plan, consensus=True)), "abcd") as swarm:
            if lie is not None:
                lies_at_the_end(swarm["d"].node, lie)
            await swarm.ends_equal()
            return swarm["a"].trainer.states[0].anchor

    honest = run(anchor_of(None))
    for moved in (run(anchor_of(torch.neg)), run(anchor_of(lambda values: values + 1e4))):
        assert (moved - honest).norm() <= most * honest.norm()


async def test_a_replica_keeps_what_the_norm_limit_has_not_counted():
    """The codecs are exact: after a round, anchor and local parameters hold all of it."""
    problem = replace(FAR, far={"d": 6.0}, steps=3, plan=Plan(inner_steps=3, merge="keep"))
    learned = Synthetic(problem, "d")
    start = learned.parameters["layers.0.w"].clone()
    for step in range(3):
        learned.inner_step(step, learned.backward(step))
    g = start - learned.parameters["layers.0.w"]
    async with Swarm(problem, "abcd") as swarm:
        await swarm.finished()
        anchor = swarm["d"].trainer.states[0].anchor
        kept = anchor - swarm["d"].trainer.replica.parameters["layers.0.w"]
        share = torch.linalg.vector_norm(kept) / torch.linalg.vector_norm(g)
        assert torch.allclose(kept, share * g, atol=1e-5)
        assert 0.1 < share < 0.5


async def test_a_trimmed_mean_stays_with_the_honest():
    """`d` pulls each value further than the honest do: with a trimmed mean by no more."""

    async def anchor_of(rounds: RoundConfig) -> torch.Tensor:
        problem = replace(FAR, steps=3, rounds=rounds)
        async with Swarm(problem, "abcde") as swarm:
            await swarm.ends_equal()
            return swarm["a"].trainer.states[0].anchor

    honest = replace(FAR, steps=3, far={}).reference("abce")["a"][0].anchor
    start = Synthetic(FAR, "a").parameters["layers.0.w"]
    trimmed = await anchor_of(RoundConfig(norm_limit=0.0, aggregation="trimmed"))
    taken = await anchor_of(RoundConfig(norm_limit=0.0))
    assert torch.dist(trimmed, honest) < torch.dist(start, honest) < torch.dist(taken, honest)


async def test_a_peer_that_is_too_large_again_and_again_is_left_out_and_the_others_say_so():
    problem = replace(FAR, steps=60)
    async with Swarm(problem, "abcd") as swarm:
        await swarm.ends_equal()
        told = [text for name in "abc" for text in swarm[name].warnings]
        assert told
        assert sum("of what this peer contributed" in text for text in swarm["d"].warnings) == 1
        assert all(str(text).startswith("d is in quarantine") for text in told)
        quarantine = swarm["a"].node.status()["quarantine"]
        assert isinstance(quarantine, dict)
        assert quarantine["d"] > 0
        honest = replace(problem, far={}).reference("abc")["a"][0].anchor
        with_d = swarm["a"].trainer.states[0].anchor
        assert torch.dist(with_d, honest) < torch.linalg.vector_norm(honest)
