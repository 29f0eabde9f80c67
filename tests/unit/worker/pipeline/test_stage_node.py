"""What a worker has counted on one stage stays counted when it moves to another."""

from dataclasses import replace

from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.worker.node.component import Environment, NodeConfig
from murmuration.worker.node.node import Node
from murmuration.worker.pipeline.stage_node import StageNode
from murmuration.worker.training.mailbox import Mailbox
from tests.protocol.stage_swarm import StagedProblem
from tests.protocol.swarm import inline
from tests.support.memory_transport import MemoryNetwork, MemoryTransport

PROBLEM = StagedProblem(count=3, layers=3)


async def served_by(options: NodeConfig) -> StageNode:
    node = Node(
        node=options,
        config=PROBLEM.config,
        manifest=PROBLEM.manifest,
        fragments=[Fragment(0, (TensorSpec("w", (1,)),))],
        transport=MemoryTransport(MemoryNetwork(), options.peer),
        mailbox=Mailbox(),
        environment=Environment(offload=inline, log=lambda _: None),
    )
    await node.listen()
    assert node.stages is not None
    return node.stages


async def test_a_move_keeps_the_counts() -> None:
    options = NodeConfig(peer="w", stage=1)
    before = await served_by(options)
    before.context.counts.dropped += 3
    after = await served_by(replace(options, stage=2))
    assert (after.context.stage, after.context.counts.dropped) == (2, 3)
    other = await served_by(NodeConfig(peer="x", stage=1))
    assert other.context.counts.dropped == 0
