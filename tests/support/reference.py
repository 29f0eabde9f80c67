"""The same run as real workers make, by `specification` in one process."""

from collections.abc import Sequence

import torch

from murmuration.algorithms.fragments import partition
from murmuration.worker.config import Config
from murmuration.worker.manifest import Manifest
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Cursor, load_task
from murmuration.worker.training.mailbox import Mailbox
from murmuration.worker.training.model import schema_of
from murmuration.worker.training.replica import InnerReplica
from murmuration.worker.wire import tensor_hash
from tests.support import specification
from tests.support.workers import Hashes


def reference_hashes(
    config: Config,
    peers: Sequence[str],
    early_starts: specification.AnchorPrefetch = specification.at_once,
    run: int | None = None,
) -> dict[str, Hashes]:
    """Trains all peers here, one after another, and hashes each one's outer state.

    `run` is the name of the run, from which partners are drawn; by default that of the task's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has: sums may round differently otherwise
    try:
        replicas = {peer: _replica(config, peer) for peer in peers}
        schema, plan = schema_of(replicas[peers[0]].model), config.plan
        fragments = partition(schema, plan.fragments, plan.pattern)
        run = Manifest.of(config, schema).run if run is None else run
        reference = specification.ReferenceRun(
            plan, fragments, replicas, config.run.steps, run, early_starts
        )
        outer = reference.train()
    finally:
        torch.set_num_threads(threads)
    no_momentum = plan.payload == "gradient"
    return {
        peer: Hashes(
            tensor_hash(state.anchor for state in states),
            tensor_hash(torch.empty(0) if no_momentum else state.momentum for state in states),
        )
        for peer, states in outer.items()
    }


def _replica(config: Config, peer: str) -> InnerReplica:
    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    cursor = Cursor(seed=config.run.seed, stream=peer)
    return part_of(task, config).replica(task, config, cursor, Mailbox())
