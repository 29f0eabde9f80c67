"""A `transformers.Trainer` in a swarm of one, which saves on the way and may be stopped there.

    python -m tests.support.resumed_trainer OUT [--stop-at STEP] [--resume]

Prints as JSON where it has come to; at STEP it waits to be killed.
"""

import argparse
import json
import signal
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import murmuration
from murmuration.worker.wire import tensor_hash


class Regression(nn.Module):
    """Small, in the form that a trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(inputs).squeeze(-1)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class StopAt(transformers.TrainerCallback):
    """Says that a step is over, and waits for a signal."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        if state.global_step == self._step:
            print(json.dumps({"event": "stopped", "step": self._step}), flush=True)
            signal.pause()


def main() -> None:
    """Two periods to the checkpoint, and two and a half after it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    rows = TensorDataset(inputs, inputs.sum(-1).sin())
    model = Regression()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(options.out),
            max_steps=18,
            save_steps=9,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=lambda rows: {
            "inputs": torch.stack([row[0] for row in rows]),
            "labels": torch.stack([row[1] for row in rows]),
        },
        callbacks=[
            murmuration.hf.SwarmCallback(inner_steps=4, preset="diloco", name="me"),
            StopAt(options.stop_at),
        ],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # what is printed is JSON
    trainer.train(resume_from_checkpoint=options.resume)
    (callback,) = (
        each
        for each in trainer.callback_handler.callbacks
        if isinstance(each, murmuration.hf.SwarmCallback)
    )
    assert callback.swarm is not None
    outer = callback.swarm.state_dict()
    (fragment,) = outer["fragments"]
    result = {
        "step": outer["step"],
        "version": fragment["version"],
        "anchor": tensor_hash([fragment["anchor"]]),
        "momentum": tensor_hash([fragment["momentum"]]),
        "model": tensor_hash(p.detach() for p in model.parameters()),
    }
    print(json.dumps({"event": "result", **result}), flush=True)


if __name__ == "__main__":
    main()
