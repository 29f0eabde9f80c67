"""The stage that a newcomer serves, from the members of a status document."""

import asyncio
from collections.abc import Sequence

import pytest

from worker import wire
from worker.pipeline.config import StagesConfig
from worker.pipeline.newcomer import members_at, slowest_stage
from worker.transport import Stream
from worker.transport.memory import MemoryNetwork, MemoryTransport

THREE = StagesConfig(count=3)


def member(stage: object, health: str = "alive", speed: object = None) -> dict[str, object]:
    return {"stage": stage, "health": health, "visits_per_s": speed}


def test_the_stage_with_the_fewest_live_replicas_and_the_first_of_equals() -> None:
    assert slowest_stage([member(s) for s in (0, 0, 1, 2, 2)], THREE) == 1
    assert slowest_stage([member(s) for s in (0, 1, 2)], THREE) == 0
    assert slowest_stage([], THREE) == 0


def test_the_stage_with_the_least_throughput_where_speeds_are_measured() -> None:
    """Two slow replicas of stage 2 do less than the only one of stage 1."""
    fast = [member(0, speed=9.0), member(1, speed=5.0)]
    assert slowest_stage([*fast, member(2, speed=2.0), member(2, speed=2.0)], THREE) == 2
    assert slowest_stage([*fast, member(2, speed=3.0), member(2, speed=2.5)], THREE) == 1


def test_who_has_not_measured_counts_as_the_median() -> None:
    told = [member(0, speed=4.0), member(1, speed=4.0), member(2, speed=1.0)]
    assert slowest_stage(told, THREE) == 2
    assert slowest_stage([*told, member(2)], THREE) == 0  # 1 and 4


def test_a_stage_that_routes_skip_needs_less() -> None:
    """Three of four stages: stage 0 in every route, the others in two of three."""
    members = [member(0, speed=5.0), *(member(stage, speed=4.0) for stage in (1, 2, 3))]
    assert slowest_stage(members, StagesConfig(count=4)) == 1
    assert slowest_stage(members, StagesConfig(count=4, routing="skip", skip=0.25)) == 0


@pytest.mark.parametrize("speed", [-1.0, 0.0, "fast", None])
def test_nonsense_is_no_speed(speed: object) -> None:
    assert slowest_stage([member(0), member(1, speed=speed), member(2)], THREE) == 0


def test_only_who_is_there_counts() -> None:
    members = [member(0), member(1, "suspect"), member(2, "dead"), member(2, "left")]
    assert slowest_stage(members, THREE) == 2


def test_what_is_no_member_of_a_stage_is_passed_over() -> None:
    odd = [member(0), "x", member(None), member("1"), member(7), member(-1), {"stage": 1}]
    assert slowest_stage(odd, StagesConfig(count=2)) == 1


class Answering:
    """Answers with one status document."""

    def __init__(self, kind: str, members: object) -> None:
        self.document = {"kind": kind, "members": members}

    async def on_call(self, method: str, request: bytes) -> bytes:
        assert method == "Control/Status"
        return wire.status_reply(self.document)

    async def on_stream(self, method: str, stream: Stream) -> None:
        raise AssertionError("nobody opens one")


def asked(address: str, answers: dict[str, Answering]) -> Sequence[object]:
    """What a newcomer hears that asks there."""

    async def scenario() -> Sequence[object]:
        network = MemoryNetwork()
        for name, handler in answers.items():
            await MemoryTransport(network, name).listen(handler)
        return await members_at(MemoryTransport(network, "new"), address)

    return asyncio.run(scenario())


def test_a_coordinator_is_asked_for_a_peer_that_has_measured() -> None:
    rows = [{"address": name, **member(0, health)} for name, health in
            (("gone", "lost"), ("cut", "alive"), ("there", "alive"))]  # fmt: skip
    measured = [member(0, speed=2.0)]
    coordinator, peer = Answering("coordinator", rows), Answering("worker", measured)
    assert asked("it", {"it": coordinator, "there": peer}) == measured
    assert asked("there", {"it": coordinator, "there": peer}) == measured
    assert asked("it", {"it": coordinator}) == rows


def test_an_answer_that_is_no_document_has_no_members() -> None:
    assert asked("it", {"it": Answering("coordinator", "many")}) == []
