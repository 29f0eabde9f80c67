"""A model that is exchanged as a whole goes in pieces, which changes no value."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.training.mailbox import Begin, Mailbox, RoundDone, ToIO, ToTrain
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

LAYERS = (300, 200, 150, 260, 90)
PROBLEM = Problem(layers=LAYERS, steps=8, plan=replace(PRESETS["diloco"], inner_steps=3))


async def _anchors() -> list[torch.Tensor]:
    """Of three peers, by layer."""
    async with Swarm(PROBLEM) as swarm:
        await swarm.start("a", "b", "c")
        await swarm.finished()
        swarm.assert_equal()
        states = swarm["a"].trainer.states
        return list(torch.cat([state.anchor for state in states]).split(LAYERS))


def test_a_run_in_pieces_ends_with_the_bits_of_one_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("murmuration.algorithms.plan.PIECE_ELEMENTS", 350)
    monkeypatch.setattr(Mailbox, "post", posted)
    monkeypatch.setattr(Mailbox, "answer", answered)
    assert len(PROBLEM.fragments) == 3
    run(in_pieces())
    assert all(torch.equal(*pair) for pair in zip(whole, pieces, strict=True))
    assert set(most.values()) == {2}  # a third would only take memory
