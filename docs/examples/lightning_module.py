"""A Lightning `Trainer` as a peer of a swarm.

python docs/examples/lightning_module.py --listen 127.0.0.1:7700 --min-peers 2
python docs/examples/lightning_module.py --join 127.0.0.1:7700
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import murmuration


class NextByte(LightningModule):
    """Guesses a byte from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256)
        )

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        return cross_entropy(self.layers(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
murmuration.add_arguments(parser)
options = vars(parser.parse_args())
steps = options.pop("steps")

pieces = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 32, 4)
model = NextByte()
callback = murmuration.lightning.LightningCallback(inner_steps=10, **options)
trainer = Trainer(
    max_steps=steps,
    accelerator="cpu",
    callbacks=[callback],
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(list(pieces), batch_size=16, shuffle=True))
print(f"weights {sum(p.detach().double().sum() for p in model.parameters()):.9f}")
