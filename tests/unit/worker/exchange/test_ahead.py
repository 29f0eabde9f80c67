"""Head starts by hand: told once for a round, before it, and not waited for in vain."""

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algorithms.plan import PRESETS
from tests.unit.worker.exchange.test_table import context, table_of
from worker import wire
from worker.exchange.context import Tasks
from worker.exchange.pairwise.buffer import ANCHOR, PairBuffer
from worker.exchange.pairwise.prefetch import AnchorPrefetch
from worker.exchange.pairwise.round import ArrivalSkew
from worker.exchange.types import RoundConfig
from worker.training.inbox import PrefetchedAnchor

MEAN = torch.ones(3)


class Told:
    """What the train side of peer `b` hears."""

    def __init__(self, preset: str = "noloco") -> None:
        self.now, self.messages = 100.0, list[PrefetchedAnchor]()
        self.tasks = Tasks()
        known = replace(
            context(),
            plan=PRESETS[preset],
            elements=[3] * 4,
            config=RoundConfig(floor_mbps=1e-5),
            clock=lambda: self.now,
        )
        self.config, self.lead = known.config, ArrivalSkew(known.config)
        self.lead.came(100, 0.0001)
        tell = self.messages.append
        self.head_starts = AnchorPrefetch(known, self.tasks, self.lead, self._mean, tell)

    async def _mean(self, table: PairBuffer) -> Tensor:
        return MEAN

    def lay(self, group: str = "abc", members: int = 9) -> PairBuffer:
        table = table_of(group=group)
        table.own[ANCHOR] = wire.Payload.of(bytes(12))
        self.head_starts.laid(table, members)
        return table

    def look(self, table: PairBuffer, after_s: float) -> None:
        self.now += after_s
        self.head_starts.look(table)

    async def came(self, table: PairBuffer, *peers: str) -> None:
        for peer in peers:
            table.checked.add((peer, ANCHOR))
            self.head_starts.came(table)
        await asyncio.sleep(0)

    @property
    def said(self) -> list[Tensor | None]:
        return [message.mean_anchor for message in self.messages]


def test_it_is_told_once_when_all_anchors_are_there() -> None:
    async def scenario() -> None:
        told = Told()
        table = told.lay()
        await told.came(table, "a")
        assert told.said == []
        await told.came(table, "c")
        await told.came(table, "c")
        told.look(table, 9.0)
        assert told.said == [MEAN]
        assert (told.messages[0].fragment, told.messages[0].round) == (3, 7)

    asyncio.run(scenario())


def test_nobody_waits_for_a_partner_of_whom_nothing_comes() -> None:
    async def scenario() -> None:
        told = Told()
        table = told.lay()
        told.look(table, 0.9)
        table.heard = told.now
        told.look(table, 0.9)
        assert told.said == []
        told.look(table, 0.2)
        told.look(table, 0.2)
        assert told.said == [None]

    asyncio.run(scenario())


def test_what_comes_when_nobody_waits_any_more_is_told_all_the_same() -> None:
    async def scenario() -> None:
        told = Told()
        table = told.lay()
        told.look(table, 1.1)
        await told.came(table, "a", "c")
        assert told.said == [None, MEAN]

    asyncio.run(scenario())


def test_a_partner_that_trickles_is_not_waited_for_for_ever() -> None:
    told = Told()
    table = told.lay()
    until = told.now + 1.0 + told.config.transfer_s(12)
    while told.now < until:
        assert told.said == []
        table.heard = told.now + 0.8
        told.look(table, 0.9)
    assert told.said == [None]


def test_with_overlap_nobody_waits_and_what_comes_late_is_told() -> None:
    async def scenario() -> None:
        told = Told("streaming-noloco")
        table = told.lay()
        told.look(table, 60.0)
        assert told.said == []
        await told.came(table, "a", "c")
        assert told.said == [MEAN]

    asyncio.run(scenario())


def test_who_has_not_exchanged_waits_for_as_long_as_the_others_do() -> None:
    told = Told()
    told.head_starts.ended(told.lay(group="b"))
    told.messages.clear()
    table = told.lay()
    told.lead.came(100, 200.0)  # of the anchor's and the contribution's 24
    told.look(table, 48.0)
    assert told.said == []
    told.look(table, 1.1)
    assert told.said == [None]


def test_who_sits_out_waits_for_nobody() -> None:
    told = Told()
    told.lay(group="b")
    assert told.said == [None]


@pytest.mark.parametrize(
    ("succeeded", "members", "said"), [(True, 2, [None]), (True, 3, []), (False, 2, [])]
)
def test_where_all_are_one_group_they_have_one_anchor_if_the_last_round_was_held(
    succeeded: bool, members: int, said: list[None]
) -> None:
    told = Told()
    before = told.lay(group="ab")
    before.succeeded, before.failed = succeeded, "" if succeeded else "lost"
    told.head_starts.ended(before)
    told.messages.clear()
    told.lay(group="ab", members=members)
    assert told.said == said


@pytest.mark.parametrize(("preset", "said"), [("noloco", [None]), ("streaming-noloco", [])])
def test_nobody_waits_for_a_round_that_has_no_table(preset: str, said: list[None]) -> None:
    told = Told(preset)
    told.head_starts.missing(3, 7)
    assert told.said == said


def test_without_a_shared_momentum_there_is_nothing_to_tell() -> None:
    async def scenario() -> None:
        told = Told("diloco")
        table = told.lay()
        await told.came(table, "a", "c")
        told.look(table, 9.0)
        assert told.said == []

    asyncio.run(scenario())
