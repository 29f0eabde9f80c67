"""One worker of PyTorch's own DistributedDataParallel over Gloo, as its documentation says.

Gradients are averaged in every step, in fp32, in buckets of the default sizes (1 MiB, then 25 MiB),
while the backward pass goes on. So what waits is what is left when the last gradient is there:
`Waiting` takes that moment from the hook of the last bucket.

`init_sync=False`: all start from the same seed, so there is nothing to send before the first step.
"""

import os
import time
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.lab.peers.network import interface_of
from tests.lab.peers.training import (
    Training,
    WorkerOptions,
    await_addresses,
    await_end,
    await_start,
    flat,
    say,
)

_TIMEOUT = timedelta(minutes=10)  # long enough for any link


class Waiting:
    """Notes when the last bucket of a backward pass is full: from then on it only waits."""

    def __init__(self) -> None:
        self._full_at = 0.0

    def hook(self, state: None, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        """Does what DDP does without a hook, and takes the time."""
        self._full_at = time.monotonic()
        return allreduce_hook(state, bucket)

    def since_s(self) -> float:
        """How long ago the last bucket was full."""
        return time.monotonic() - self._full_at


def main() -> None:
    options = WorkerOptions.parse()
    training, waiting = Training(options), Waiting()
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(options.address)
    store = _meet(options)
    distributed.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=options.workers, timeout=_TIMEOUT
    )
    model = DistributedDataParallel(training.model, init_sync=False)
    model.register_comm_hook(None, waiting.hook)
    training.replica.model = model
    training.waited_s = waiting.since_s
    await_start()
    training.run(lambda: True)  # it has happened in the backward pass
    training.report(
        anchor=flat(training.model.parameters()),
        momentum=torch.empty(0),
        system=f"PyTorch {torch.__version__.partition('+')[0]}, DDP, Gloo, fp32, overlapped",
    )
    await_end()
    os._exit(0)  # its threads wait for peers that are gone


def _meet(options: WorkerOptions) -> TCPStore:
    """The first worker's store; each worker says where it is, if it has one."""
    known = await_addresses()
    if options.rank == 0:
        store = TCPStore(options.address, 0, is_master=True, wait_for_workers=False)
        say(event="listening", addresses=[f"{options.address}:{store.port}"])
        return store
    say(event="listening", addresses=[])
    host, _, port = known[0].rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)


if __name__ == "__main__":
    main()
