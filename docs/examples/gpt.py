"""A small GPT, trained with Muon and AdamW by as many peers as come.

python docs/examples/gpt.py --listen 127.0.0.1:7700 --min-peers 3
python docs/examples/gpt.py --join 127.0.0.1:7700
python docs/examples/gpt.py --join 127.0.0.1:7700
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import murmuration


class Block(nn.Module):
    """Attention and a squared-ReLU layer, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        normed = functional.rms_norm(x, (d,))
        parts = (
            self.attend(normed).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        q, k = (functional.rms_norm(each, (d // self.heads,)) for each in parts[:2])
        seen = functional.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.up(functional.rms_norm(x, (d,))).relu().square())


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 3, context: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(functional.rms_norm(x, x.shape[-1:]))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
murmuration.add_arguments(parser)
options = parser.parse_args()

text = b"".join(
    path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
)
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 65, 64)
held_out = windows[-64:]
samples = torch.utils.data.TensorDataset(windows[:-64])
loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)

model = GPT()
muon = murmuration.Muon(model.layers.parameters(), lr=0.01, momentum=0.95, weight_decay=0.0)
adamw = torch.optim.AdamW(
    [*model.embed.parameters(), *model.place.parameters(), *model.head.parameters()], lr=0.01
)


def loss_of(batch: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of the bytes of (b, t + 1) windows after their first."""
    tokens = batch.long()
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


with murmuration.Swarm(model, [muon, adamw], inner_steps=20, **vars(options)) as swarm:
    for (batch,) in swarm.shard(loader):
        loss = loss_of(batch)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if swarm.step % 50 == 0:
            print(f"{swarm.name} step {swarm.step}: {loss.item():.3f}, {len(swarm.peers)} peers")
with torch.no_grad():
    loss = loss_of(held_out)
print(f"loss {loss.item():.6f}, weights {sum(p.double().sum() for p in model.parameters()):.9f}")
