"""A training loop of one's own: SGD, Muon, accumulation, bf16 autocast, clipping, OneCycleLR."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

text = torch.tensor(list(Path(__file__).read_bytes() * 8))
torch.manual_seed(0)
samples = torch.utils.data.TensorDataset(text.unfold(0, 33, 8))
loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)

model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))
sgd = torch.optim.SGD([model[0].weight, model[1].bias, model[3].bias], lr=0.5, momentum=0.9)
muon = torch.optim.Muon([model[1].weight, model[3].weight], lr=0.02, momentum=0.9)
schedulers = [
    torch.optim.lr_scheduler.OneCycleLR(each, max_lr=each.defaults["lr"], total_steps=options.steps)
    for each in (sgd, muon)
]

batches = (batch for _ in range(10**6) for (batch,) in loader)
for _ in range(options.steps):
    for _ in range(2):  # accumulated
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for each in (sgd, muon, *schedulers):
        each.step()
    model.zero_grad()
print(
    f"loss {2 * loss.item():.6f}, weights {sum(p.double().sum() for p in model.parameters()):.9f}"
)
