"""Four bits both ways, compressed or not: few bits travel, all agree, and damage is mended."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.measured import ExchangeConfig
from murmuration.worker.wire import Payload, hash64
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, once
from tests.protocol.virtual_time import run

NAMES = "abc"


def problem(compression: str, elements: int = 60_000) -> Problem:
    return Problem(
        layers=(elements, elements // 2),
        steps=6,
        plan=Plan(
            inner_steps=3,
            fragments=2,
            codec="e3m0",
            reduction_codec="e3m0",
        ),
        exchange=ExchangeConfig(compression=compression),
    )


def test_four_bits_are_four_bits_on_the_wire_and_fewer_when_compressed() -> None:
    async def scenario(compression: str) -> list[tuple[float, ...]]:
        async with Swarm(problem(compression)) as swarm:
            await swarm.start(*NAMES)
            await swarm.finished()
            swarm.assert_reference()
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


def test_compressing_changes_no_bit_of_what_is_agreed() -> None:
    async def scenario(compression: str) -> tuple[str, int]:
        async with Swarm(problem(compression, elements=5_000)) as swarm:
            await swarm.start(*NAMES)
            await swarm.finished()
            swarm.assert_equal()
            return swarm["a"].outer_hash, swarm["a"].payload_sent_bytes

    always, never, auto = (run(scenario(mode)) for mode in ("always", "never", "auto"))
    assert always[0] == never[0] == auto[0]
    assert always[1] < never[1]


def test_peers_need_not_agree_on_compressing() -> None:
    async def scenario() -> None:
        shared = problem("never", elements=5_000)
        async with Swarm(shared) as swarm:
            for name, mode in zip(NAMES, ("always", "never", "auto"), strict=True):
                own = replace(shared, exchange=ExchangeConfig(compression=mode))
                via = [other for other in NAMES if other != name]
                await swarm.join(name, via=via, min_peers=3, problem=own)
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())


# -------------------------------------------------------------------------------------- damage


def garbage(frame: pb.Frame) -> pb.Frame:
    return rehashed(frame, b"no zstd " * 20)


def cut_short(frame: pb.Frame) -> pb.Frame:
    return rehashed(frame, frame.payload[: len(frame.payload) // 2])


def other_size(frame: pb.Frame) -> pb.Frame:
    changed = rehashed(frame, frame.payload)
    changed.raw_bytes -= 1
    return changed


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


@pytest.mark.parametrize("up", [True, False], ids=["contribution", "reduction"])
@pytest.mark.parametrize(
    "damage", [garbage, cut_short, other_size, other_values, flipped_bit], ids=lambda d: d.__name__
)
def test_a_compressed_frame_damaged_on_the_way_is_sent_again(
    damage: Callable[[pb.Frame], pb.Frame], up: bool
) -> None:
    kind = pb.ExchangeUp if up else pb.ExchangeDown
    spoiled = []

    def spoil(passing: Passing) -> bytes:
        message = kind.FromString(passing.message)
        assert message.frame.raw_bytes > 0  # it is a compressed one
        spoiled.append(passing)
        message.frame.CopyFrom(damage(message.frame))
        return message.SerializeToString()

    async def scenario() -> None:
        async with Swarm(problem("always", elements=5_000)) as swarm:
            swarm.tap = once(lambda p: p.up == up and p.body == "frame", spoil)
            await swarm.start(*NAMES)
            await swarm.finished()
            assert len(spoiled) == 1
            swarm.assert_reference()
            assert sum(sum(peer.refused.values()) for peer in swarm.alive) == int(up)
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []

    run(scenario())
