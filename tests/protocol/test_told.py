"""What peers tell of themselves: in their status, and at the end of their run."""

import asyncio
from dataclasses import replace

import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.training.mailbox import Begin, TrainingEvent
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

PROBLEM = Problem(layers=(31, 17), plan=replace(PRESETS["diloco"], inner_steps=5), steps=15)


def test_a_peer_says_how_long_it_has_been_here() -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.join("a", via=[], min_peers=2)
            await swarm.sleep(3.0)
            await swarm.join("b", via=["a"], min_peers=2)
            await swarm.sleep(2.0)
            assert [swarm[name].node.status()["up_s"] for name in "ab"] == [5.0, 2.0]

    run(scenario())


def test_who_waits_for_the_others_in_the_end_says_so_once() -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start("a", "b")
            await swarm.finished()
            for peer in swarm.alive:
                told = [event["state"] for event in peer.of_kind("progress")]
                assert told.index("settling") == len(told) - 1
                assert "training" in told

    run(scenario())


def test_a_round_that_takes_far_longer_than_the_last_says_for_whom() -> None:
    async def scenario() -> None:
        step_s = dict.fromkeys("abc", 0.5)
        async with Swarm(replace(steady(20), step_s=step_s)) as swarm:
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions >= (2,), 30)
            assert swarm["a"].of_kind("stalled") == []
            step_s["c"] = 3.0
            await swarm.until(lambda: swarm["a"].versions >= (3,), 30)
            step_s["c"] = 0.5
            await swarm.finished()
            for name in "ab":
                told = swarm[name].of_kind("stalled")[0]
                assert (told["round"], told["waiting_for"]) == (2, ["c"])
                assert float(str(told["seconds"])) > 2 * float(str(told["last_s"]))

    run(scenario())


def test_an_encoding_holds_up_nothing_else_that_training_says() -> None:
    """Neither samples nor stages wait for it; rounds begin in the order that they are given in."""

    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.join("a", via=[], min_peers=2)
            await swarm.sleep(1.0)
            node, goes_on, begun = swarm["a"].node, asyncio.Event(), list[int]()

            async def encode(begin: Begin) -> None:
                begun.append(begin.round)
                await goes_on.wait()

            node._own_rounds.begin = encode  # type: ignore[method-assign]
            for number in range(3):
                node.deliver(Begin(0, number, ("a",), torch.zeros(1)))
                node.deliver(TrainingEvent({"event": "progress", "state": str(number)}))
            async with asyncio.timeout(1.0):
                await node.settled()
            assert [event["state"] for event in swarm["a"].of_kind("progress")][-3:] == [*"012"]
            assert begun == [0]
            goes_on.set()
            await swarm.sleep(0.1)
            assert begun == [0, 1, 2]

    run(scenario())
