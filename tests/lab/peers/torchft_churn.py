"""One worker of torchft 0.2.0's DiLoCo that may be killed, and tells of each round that it takes.

    python -m tests.lab.peers.torchft_churn NAME ADDRESS PLACE PAUSE_S INNER_STEPS LIGHTHOUSE_URL

As `torchft_diloco`, but with everything that torchft does about failures: a quorum may be of
`MIN_REPLICAS`, and a process that is started again takes over the state of another ("heals"). What
it has learned before that is lost, as is what all have before a round that is not committed.
"""

import os
import socket
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import count

import torch
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from murmuration.worker.tasks import Cursor, load_task
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica
from tests.lab.peers.network import interface_of
from tests.lab.peers.training import PLAN, say

MIN_REPLICAS = 5  # most of eight
_TIMEOUT = timedelta(seconds=10)  # of an all-reduce; its default of 60 s is as long as some rounds
_QUORUM_TIMEOUT = timedelta(hours=1)  # "for DiLoCo": else a worker that is cut off ends


def main() -> None:
    name, address, place, pause_s, inner_steps, url = sys.argv[1:]
    torch.set_num_threads(1)
    task = load_task(
        "tests.support.slow_task:SlowBytes", seed=0, options={"pause_s": float(pause_s)}
    )
    model = task.model()
    cursor = Cursor(seed=0, stream=name)
    replica = InnerReplica(task, model, InnerConfig(), cursor, 10_000_000)
    (inner,) = replica.optimizers
    outer = torch.optim.SGD(
        model.parameters(), lr=PLAN.outer_lr, momentum=PLAN.outer_momentum, nesterov=True
    )
    healed = False

    def load_state(state: Mapping[str, dict[str, object]]) -> None:
        nonlocal healed
        healed = True
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    # It tells others to fetch its state from the host's name, which means nothing in a namespace.
    socket.gethostname = lambda: address
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    tell("listening", name)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=MIN_REPLICAS,
        use_async_quorum=False,  # DiLoCo insists
        timeout=_TIMEOUT,
        quorum_timeout=_QUORUM_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=url,
        replica_id=f"place{place}",
        hostname=address,
        init_sync=False,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=int(inner_steps)):
        ended = datetime.now()
        for step in count(1):
            gradients = replica.backward(step)
            if step == 1:
                tell("started", name)
            healed, before, began = False, manager.current_step(), datetime.now()
            replica.inner_step(step, gradients)
            if step % int(inner_steps) == 0:
                after, computed = manager.current_step(), (began - ended).total_seconds()
                ended = datetime.now()
                tell(
                    "round" if after > before else "round_failed",
                    name,
                    fragment=0,
                    round=after - 1,
                    contributors=manager.num_participants(),
                    missed=False,
                    work_steps=0 if healed else int(inner_steps),
                    steps=0 if healed else int(inner_steps),
                    step_s=computed / int(inner_steps),
                    stall_s=(ended - began).total_seconds(),
                )


def tell(event: str, name: str, **fields: object) -> None:
    at = datetime.now().astimezone().isoformat(timespec="milliseconds")
    say(event=event, peer=name, at=at, **fields)


if __name__ == "__main__":
    main()
