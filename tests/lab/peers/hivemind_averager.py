"""One worker of DiLoCo over hivemind 1.1.12's averager.

hivemind itself has no DiLoCo. Here its `DecentralizedAverager` averages the pseudo-gradients after
every H inner steps, blocking, over the group of all; the outer Nesterov step that follows is
Murmuration's own, on every worker by itself. So the algorithm is DiLoCo, and what is measured is
hivemind's matchmaking and all-reduce.

- The group is full with everyone and then starts at once; fewer are no group. So
  `min_matchmaking_time` is not waited out: it is how long a peer's offer stands until the next.
- `part_size_bytes` is 64 KiB: of the default 512 KiB the model has only three parts, which four
  reducers cannot share evenly.
- Compression is none. Not 8 bit: it has returned tensors unaveraged.
- Every peer adds a difference to what it had, so averages agree to rounding, not bit for bit.
- Connections are encrypted; hivemind's p2pd knows no other way. Its means to pass NATs are off.
- Parts of an answer that get lost go unnoticed but for a warning: `LostParts` counts such rounds.
"""

import logging
import multiprocessing
import sys

import hivemind
import torch
from hivemind.compression import NoCompression

from murmuration.algorithms.diloco import Nesterov, pseudo_gradient
from tests.lab.peers.training import (
    PLAN,
    Training,
    WorkerOptions,
    await_addresses,
    await_end,
    await_start,
    say,
)

# Four workers on two busy cores behind 20 Mbit/s: 1 s and 0.5 s lost a round now and then, 2 s and
# 1 s none, nor were they slower. The defaults are 5 s and 3 s; the second must be the smaller.
_MATCHMAKING_S = 2.0
_REQUEST_S = 1.0
_PART_BYTES = 64 * 1024
_ROUND_S = 60.0  # to find the group, and then to average; a round that takes longer has failed


class LostParts(logging.Handler):
    """Counts hivemind's warnings that an average is not everybody's.

    Where a peer does not answer in full, hivemind leaves the parts it lacks as they were, or leaves
    a peer out of them, and reports success: the warning is all there is. It happens now and then on
    slow links and busy processors: streams are reset, and the last parts in them are lost. The
    averager is a forked process, hence the shared counter, made before it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._count = multiprocessing.Value("i", 0)
        logging.getLogger("hivemind.averaging.partition").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        with self._count.get_lock():
            self._count.value += 1

    @property
    def count(self) -> int:
        return self._count.value


class Exchange:
    """The outer state, and the averager that moves it."""

    def __init__(
        self, training: Training, averager: hivemind.DecentralizedAverager, lost: LostParts
    ) -> None:
        self._training, self._averager, self._lost = training, averager, lost
        self.rounds_partial = 0
        self._outer = Nesterov(PLAN.outer_lr, PLAN.outer_momentum)
        self.anchor = training.fragment.flatten(training.replica.parameters)
        self.momentum = torch.zeros_like(self.anchor)

    def __call__(self) -> bool:
        """One round; when it fails, the local parameters go on and the anchor stays."""
        local = self._training.fragment.flatten(self._training.replica.parameters)
        with self._averager.get_tensors() as (shared,):
            shared.copy_(pseudo_gradient(self.anchor, local))
        lost_before = self._lost.count
        try:
            group = self._averager.step(timeout=_ROUND_S)
        except Exception as error:  # several kinds of its own, and asyncio's
            print(f"round failed: {error!r}", file=sys.stderr, flush=True)
            return False
        if group is None:
            return False
        self.rounds_partial += self._lost.count > lost_before
        with self._averager.get_tensors() as (shared,):
            mean = shared.clone()
        self.anchor, self.momentum = self._outer.step(self.anchor, self.momentum, mean)
        self._training.load(self.anchor)
        return True


def main() -> None:
    options = WorkerOptions.parse()
    training = Training(options)
    dht = hivemind.DHT(
        initial_peers=await_addresses(),
        host_maddrs=[f"/ip4/{options.address}/tcp/0"],
        start=True,
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )
    say(event="listening", addresses=[str(address) for address in dht.get_visible_maddrs()])
    lost = LostParts()
    averager = hivemind.DecentralizedAverager(
        [torch.zeros(training.fragment.elements)],
        dht,
        start=True,
        prefix="diloco",
        target_group_size=options.workers,
        min_group_size=options.workers,
        min_matchmaking_time=_MATCHMAKING_S,
        request_timeout=_REQUEST_S,
        allreduce_timeout=_ROUND_S,
        part_size_bytes=_PART_BYTES,
        compression=NoCompression(),
        allow_state_sharing=False,
    )
    exchange = Exchange(training, averager, lost)
    await_start()
    training.run(exchange)
    training.report(
        anchor=exchange.anchor,
        momentum=exchange.momentum,
        system=f"hivemind {hivemind.__version__}, averager, fp32",
        rounds_partial=exchange.rounds_partial,
    )
    await_end()
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
