"""A loop with accelerate as a peer of a swarm.

python docs/examples/accelerate_loop.py --listen 127.0.0.1:7700 --min-peers 2
python docs/examples/accelerate_loop.py --join 127.0.0.1:7700
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.nn.functional import cross_entropy

import murmuration

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
murmuration.add_arguments(parser)
options = vars(parser.parse_args())

text = torch.tensor(list(Path(__file__).read_bytes() * 8))
torch.manual_seed(0)
samples = torch.utils.data.TensorDataset(text.unfold(0, 33, 8))
loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options["steps"])
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)  # not the loader

with murmuration.Swarm(model, optimizer, inner_steps=10, **options) as swarm:
    while not swarm.done:
        for (batch,) in swarm.shard(loader):
            batch = send_to_device(batch, accelerator.device)
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1])
                loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
print(f"loss {loss.item():.6f}, weights {sum(p.double().sum() for p in model.parameters()):.9f}")
