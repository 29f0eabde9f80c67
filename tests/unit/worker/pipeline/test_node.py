"""What a worker has counted on one stage stays counted when it moves to another."""

import asyncio
from dataclasses import replace

from tests.protocol.stage_swarm import StagedProblem
from tests.protocol.swarm import inline
from worker.component import Environment, NodeConfig
from worker.node import Node
from worker.pipeline.node import StageNode
from worker.training.inbox import Mailbox
from worker.transport.memory import MemoryNetwork, MemoryTransport

PROBLEM = StagedProblem(count=3, layers=3)


async def served_by(options: NodeConfig) -> StageNode:
    """By a node that listens."""
    node = Node(
        node=options,
        config=PROBLEM.config,
        manifest=PROBLEM.manifest,
        elements=[1],
        transport=MemoryTransport(MemoryNetwork(), options.peer),
        mailbox=Mailbox(),
        environment=Environment(offload=inline, log=lambda event: None),
    )
    await node.listen()
    assert node.stages is not None
    return node.stages


def test_a_move_keeps_the_counts() -> None:
    options = NodeConfig(peer="w", stage=1)
    before = asyncio.run(served_by(options))
    before.context.counts.dropped += 3
    after = asyncio.run(served_by(replace(options, stage=2)))
    assert (after.context.stage, after.context.counts.dropped) == (2, 3)
    assert asyncio.run(served_by(NodeConfig(peer="x", stage=1))).context.counts.dropped == 0
