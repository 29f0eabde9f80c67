"""One worker of torchft 0.2.0's DiLoCo over Gloo: a replica group of its own, of one process.

Used as its documentation says: `torchft.local_sgd.DiLoCo` around the model and the inner optimizer,
outer SGD with Nesterov momentum, one fragment, a synchronous quorum before each all-reduce.

- `init_sync=False`: all start from the same seed, so there is nothing to heal at step 0.
- One all-reduce per parameter, torchft's default: bucketized was not faster at 20 Mbit/s.
- fp32 only: `should_quantize` needs Triton and a GPU.
- GLOO_SOCKET_IFNAME is set, since the host's name may mean nothing in a network namespace.
"""

import os
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from tests.lab.peers.network import interface_of
from tests.lab.peers.training import (
    PLAN,
    Training,
    WorkerOptions,
    await_addresses,
    await_end,
    await_start,
    flat,
)

# Long enough for any link: no measured round may end by a time-out.
_TIMEOUT = timedelta(minutes=10)


def main() -> None:
    options = WorkerOptions.parse()
    training = Training(options)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(options.address)
    store = TCPStore(options.address, 0, is_master=True, wait_for_workers=False)
    (lighthouse_url,) = await_addresses()
    manager = _manager(training, store, lighthouse_url)
    model, inner = training.model, training.optimizer
    outer = torch.optim.SGD(
        model.parameters(), lr=PLAN.outer_lr, momentum=PLAN.outer_momentum, nesterov=True
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=options.inner_steps):
        await_start()
        rounds = 0

        def exchange() -> bool:
            """The inner optimizer's hook has done it; was it committed?"""
            nonlocal rounds
            before, rounds = rounds, manager.current_step()
            return rounds > before

        training.run(exchange)
    # The last step was a round's: what the model holds is the anchor.
    training.report(
        anchor=flat(model.parameters()),
        momentum=flat(outer.state[p]["momentum_buffer"] for p in model.parameters()),
        system="torchft 0.2.0, DiLoCo, Gloo, fp32",
    )
    await_end()
    os._exit(0)  # its threads wait for peers that are gone


def _manager(training: Training, store: TCPStore, lighthouse_url: str) -> Manager:
    options, model, inner = training.options, training.model, training.optimizer

    def load_state(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    return Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=options.workers,
        use_async_quorum=False,  # DiLoCo insists
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=timedelta(minutes=1),
        rank=0,
        world_size=1,
        store_addr=options.address,
        store_port=store.port,
        lighthouse_addr=lighthouse_url,
        replica_id=options.name,
        hostname=options.address,
        init_sync=False,
    )


if __name__ == "__main__":
    main()
