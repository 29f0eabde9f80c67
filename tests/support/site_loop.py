"""The same steps by one process, or by two ranks that each take half of every batch.

    python -m tests.support.site_loop STEPS [one cuda]
    torchrun --nproc-per-node 2 -m tests.support.site_loop STEPS fsdp [cuda]

Rank 0 prints the final parameters as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import murmuration


def main() -> None:
    """Trains with two optimizers, momentum and clipping, a round every four steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    inputs, targets = torch.randn(8, 20, 6), torch.randn(8, 20, 3)
    kind, device = (sys.argv[2:] + ["one", "cpu"][len(sys.argv) - 2 :])[:2]
    model, inputs, targets = (each.to(device) for each in (model, inputs, targets))
    rank, ranks = 0, 1
    if kind != "one":
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
    first, *others = model.parameters()
    optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in ([first], others)]
    swarm = murmuration.Swarm(model, optimizers, inner_steps=4, steps=int(sys.argv[1]))
    with swarm:
        while not swarm.done:
            chosen = swarm.step % 8
            mine = slice(rank * 20 // ranks, (rank + 1) * 20 // ranks)
            loss = (model(inputs[chosen, mine]) - targets[chosen, mine]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with swarm.anchor():
            pass
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if rank == 0:
        print(json.dumps([value for p in whole for value in p.detach().flatten().tolist()]))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
