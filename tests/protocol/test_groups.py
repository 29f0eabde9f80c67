"""A member lies about who contributes, or about who is to: no group changes by its word alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.allreduce.closing import DueMean
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run

PROBLEM = Problem(plan=Plan(inner_steps=5), steps=1_000_000)


def only_itself(due: DueMean) -> DueMean:
    """Its own contribution is all that counts, and nobody joins."""
    at = due.contributors.index("d")
    inputs = {"inputs": due.inputs[at : at + 1], "weights": due.weights[at : at + 1]}
    return replace(due, contributors=("d",), factors=(1.0,), last="d", joiners=(), **inputs)


def with_ghosts(due: DueMean) -> DueMean:
    """As many joiners as are taken."""
    ghosts = tuple(f"ghost {n}" for n in range(4))
    return replace(due, joiners=ghosts if due.key.round % 4 == due.key.shard else ())


def lies(peer: Peer, lie: Callable[[DueMean], DueMean]) -> None:
    """The peer closes its shards as `lie` says."""
    for reducer in peer.node._reducers:
        shards = reducer._shards
        honest = shards._compute
        shards._compute = lambda *args, honest=honest: lie(honest(*args))  # type: ignore[method-assign]


@pytest.mark.parametrize("lie", [only_itself, with_ghosts], ids=["only itself", "ghosts"])
def test_a_liar_leaves_nobody_out_and_slows_nobody(lie: Callable[[DueMean], DueMean]) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*"abcd")
            first = swarm["a"]
            await swarm.until(lambda: min(first.versions) >= 3, 60)
            lies(swarm["d"], lie)
            before = min(first.versions)
            await swarm.sleep(30)
            assert min(first.versions) >= before + 0.9 * 30 / 0.55
            assert set("abcd") <= set(first.trainer.states[0].group)
            assert len(first.trainer.states[0].group) <= 8
            await swarm.join("e", via="a")
            await swarm.until(lambda: "e" in first.trainer.states[0].group, 20)

    run(scenario())
