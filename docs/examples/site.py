"""A site of several processes as one peer: DDP, or sharded by FSDP2.

torchrun --nproc-per-node 2 docs/examples/site.py --listen 127.0.0.1:7700 --min-peers 2
python docs/examples/site.py --join 127.0.0.1:7700
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import murmuration

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--shard", choices=["fsdp", "ddp"], default="fsdp")
murmuration.add_arguments(parser)
options = vars(parser.parse_args())
shard = options.pop("shard")

torch.manual_seed(0)
model: nn.Module = nn.Sequential(
    nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256)
)
torchrun = dist.is_torchelastic_launched()
if torchrun:
    dist.init_process_group("gloo")
    model = fully_shard(model) if shard == "fsdp" else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
pieces = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 33, 2)
loader = [pieces[start::97] for start in range(97)]

with murmuration.Swarm(model, optimizer, inner_steps=10, **options) as swarm:
    while not swarm.done:
        for batch in swarm.shard(loader):
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
print(f"{swarm.name}: weights {sum(p.detach().double().sum() for p in whole):.9f}", flush=True)
if torchrun:
    dist.destroy_process_group()
