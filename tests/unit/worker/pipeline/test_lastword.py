"""An origin's last word, and the answer that vouches for a sum."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from algorithms.codecs import codec_by_name
from protos import murmuration_pb2 as pb
from tests.protocol.virtual_time import run
from tests.unit.worker.pipeline.members import cards_of
from worker import wire
from worker.membership import Health, Member
from worker.pipeline.barrier import BarrierReceiver, BarrierSender
from worker.pipeline.config import StagesConfig
from worker.pipeline.context import StageContext
from worker.pipeline.stage_call import Incarnation
from worker.pipeline.tracker import IterationTracker
from worker.transport import Stream
from worker.transport.memory import MemoryNetwork, MemoryTransport

RUN, ITERATION = 7, 5


def word(run_id: int = RUN, counted: Sequence[int] = (0,)) -> bytes:
    request = pb.FinishedRequest(
        run=run_id, origin="a", epoch=1, iteration=ITERATION, counted=counted
    )
    return request.SerializeToString()


class Stage:
    """A listener in iteration 5 that finds it to be over when it is told to."""

    def __init__(self) -> None:
        self.counting, self.heard = IterationTracker(ITERATION), 0
        self.listener = BarrierReceiver(RUN, self.counting, self._hear)

    def _hear(self) -> None:
        self.heard += 1

    def ends(self) -> None:
        self.counting.ended = ITERATION
        self.listener.turned()

    async def answers(self, request: bytes) -> tuple[bool, float]:
        """Whether it says that the iteration is over, and after how long (s)."""
        clock = asyncio.get_running_loop().time
        began = clock()
        reply = pb.FinishedReply.FromString(await self.listener.answer(request))
        return reply.over, clock() - began


def test_an_answer_waits_for_the_end_of_the_iteration() -> None:
    async def scenario() -> None:
        stage = Stage()
        over, waited_s = await stage.answers(word())
        assert not over
        assert waited_s > 0
        asyncio.get_running_loop().call_later(waited_s / 2, stage.ends)
        over, until_s = await stage.answers(word())
        assert over
        assert until_s == pytest.approx(waited_s / 2)
        assert await stage.answers(word()) == (True, 0)
        assert stage.heard == 3

    run(scenario())


def test_where_nothing_was_counted_the_answer_is_at_once() -> None:
    async def scenario() -> None:
        assert await Stage().answers(word(counted=())) == (False, 0)

    run(scenario())


def test_a_word_on_another_run_is_refused() -> None:
    async def scenario() -> None:
        stage = Stage()
        with pytest.raises(wire.WireError, match="another run"):
            await stage.answers(word(run_id=RUN + 1))
        assert stage.heard == 0

    run(scenario())


class Replica:
    """A peer of stage 1 that answers each call as it is scripted: over, not yet, or not at all."""

    def __init__(self, *script: bool | None) -> None:
        self.member = cards_of(0, 1)[1]
        self.script, self.calls, self.events = list(script), 0, list[dict[str, object]]()
        self.last = self.member  # what the origin knows when the script is at its end

    async def on_call(self, method: str, request: bytes) -> bytes:
        assert method == "Control/Finished"
        self.calls += 1
        over = self.script.pop(0)
        if not self.script:
            self.member = self.last
        if over is None:
            raise wire.WireError("broken")
        return pb.FinishedReply(over=over).SerializeToString()

    async def on_stream(self, method: str, stream: Stream) -> None:
        raise AssertionError(method)

    def told(self, counted: Sequence[int]) -> list[object]:
        """The kinds of events that telling comes to."""

        async def scenario() -> int:
            network = MemoryNetwork()
            origin = MemoryTransport(network, "p0")
            serving = MemoryTransport(network, self.member.address)
            await serving.listen(self)
            context = StageContext(
                me="p0",
                run=RUN,
                seed=3,
                stage=0,
                config=StagesConfig(count=2),
                codec=codec_by_name("fp32"),
                transport=origin,
                members=lambda: [self.member],
                doubt=lambda peer: None,
                clock=lambda: 0.0,
                log=self.events.append,
            )
            await BarrierSender(context).tell(
                Incarnation("p0", 1), self.member.peer, ITERATION, counted
            )
            await serving.close()
            return context.counts.lost

        lost = run(scenario())
        assert lost == (len(counted) if "lost" in [e["event"] for e in self.events] else 0)
        assert all(e["microbatches"] == list(counted) for e in self.events)
        return [event["event"] for event in self.events]


def test_an_origin_asks_until_the_sum_is_complete() -> None:
    replica = Replica(False, None, False, None, True)
    assert replica.told([0, 2]) == ["unconfirmed", "confirmed"]
    assert replica.calls == 5


def test_a_peer_that_has_counted_nothing_is_told_once() -> None:
    replica = Replica(None, False)
    assert (replica.told([]), replica.calls) == ([], 2)


CARD = cards_of(0, 1)[1]


def test_what_was_unconfirmed_is_lost_where_the_peer_is_gone() -> None:
    replica = Replica(None)
    replica.last = replace(CARD, health=Health.DEAD, step=ITERATION - 1)
    assert replica.told([1]) == ["unconfirmed", "lost"]


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (replace(CARD, health=Health.DEAD, step=ITERATION - 1), ["lost"]),
        (replace(CARD, health=Health.LEFT, step=ITERATION), []),
        (replace(CARD, epoch=CARD.epoch + 1, step=ITERATION), ["lost"]),
    ],
    ids=["dead", "left, with the iteration done", "another life"],
)
def test_what_a_peer_has_counted_is_lost_with_its_life(then: Member, told: list[str]) -> None:
    replica = Replica(False)  # it has the word, and is amid the iteration
    replica.last = then
    assert replica.told([1]) == told
