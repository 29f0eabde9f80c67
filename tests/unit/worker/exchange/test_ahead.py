"""Head starts by hand: told once for a round, before it, and never waited for in vain."""

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algorithms.plan import PRESETS
from tests.unit.worker.exchange.test_table import context, table_of
from worker.exchange.ahead import HeadStarts
from worker.exchange.context import Tasks
from worker.exchange.table import ANCHOR, Table
from worker.mailbox import Ahead

MEAN = torch.ones(3)


class Told:
    """What the train side of peer `b` hears."""

    def __init__(self, preset: str = "noloco") -> None:
        self.now, self.messages = 100.0, list[Ahead]()
        self.tasks = Tasks()
        known = replace(context(), plan=PRESETS[preset], clock=lambda: self.now)
        self.head_starts = HeadStarts(known, self.tasks, self._mean, self.messages.append)

    async def _mean(self, table: Table) -> Tensor:
        return MEAN

    def lay(self, group: str = "abc") -> Table:
        table = table_of(group=group)
        self.head_starts.laid(table)
        return table

    async def came(self, table: Table, *peers: str) -> None:
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
        told.now += 9.0
        told.head_starts.look(table)
        assert told.said == [MEAN]
        assert (told.messages[0].fragment, told.messages[0].round) == (3, 7)

    asyncio.run(scenario())


def test_nobody_waits_for_a_partner_of_whom_nothing_comes() -> None:
    async def scenario() -> None:
        told = Told()
        table = told.lay()
        told.now += 0.4
        told.head_starts.look(table)
        table.heard = told.now
        told.now += 0.4
        told.head_starts.look(table)
        assert told.said == []
        told.now += 0.2
        told.head_starts.look(table)
        await told.came(table, "a", "c")
        assert told.said == [None]

    asyncio.run(scenario())


def test_who_sits_out_waits_for_nobody() -> None:
    told = Told()
    told.lay(group="b")
    assert told.said == [None]


@pytest.mark.parametrize(("succeeded", "said"), [(True, [None]), (False, [])])
def test_the_group_of_the_last_round_has_the_same_anchor_if_it_was_held(
    succeeded: bool, said: list[None]
) -> None:
    told = Told()
    before = told.lay(group="ab")
    before.succeeded, before.failed = succeeded, "" if succeeded else "lost"
    told.head_starts.ended(before)
    told.messages.clear()
    told.lay(group="ab")
    assert told.said == said
    told.lay(group="bc")
    assert told.said == said


def test_without_a_shared_momentum_there_is_nothing_to_tell() -> None:
    async def scenario() -> None:
        told = Told("diloco")
        table = told.lay()
        await told.came(table, "a", "c")
        told.now += 9.0
        told.head_starts.look(table)
        assert told.said == []

    asyncio.run(scenario())
