"""A training loop of one's own around the built-in task's model and samples, as a peer of a swarm.

With a trainer, "transformers" or "lightning", the loop is that one's, at a constant learning rate.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

import murmuration
from murmuration.worker.config import Config, parse_config, task_of
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import Batch, Cursor, Task, next_batch
from murmuration.worker.training.outer_state import unpacked
from murmuration.worker.wire import tensor_hash
from tests.support.peers import PATIENT, Peer


class Samples(IterableDataset[tuple[Tensor, Tensor]]):
    """A peer's batches of a task."""

    def __init__(self, task: Task, cursor: Cursor) -> None:
        self._task, self._cursor = task, cursor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._task.batches("train", self._cursor)
        while True:
            batch = next_batch(batches, "train")
            yield {"inputs": batch.inputs, "targets": batch.targets}


def batch_of(given: dict[str, Tensor]) -> Batch:
    return Batch(given["inputs"], given["targets"], Cursor(seed=0, stream=""))


def train_by_transformers(
    task: Task, model: nn.Module, optimizer: Optimizer, samples: Samples, config: Config, swarm: Any
) -> murmuration.Swarm:
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(samples, batch_size=None)

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **_others: Any) -> Tensor:
            return task.loss(model, batch_of(inputs))

    arguments = transformers.TrainingArguments(
        output_dir=swarm["out"],
        max_steps=config.run.steps,
        max_grad_norm=config.inner.clip,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    callback = murmuration.hf.SwarmCallback(**swarm)
    trainer = Trainer(
        nn.Sequential(model),  # without the model's `config`, which is not a transformers' one
        arguments,
        train_dataset=samples,
        optimizers=(optimizer, still),
        callbacks=[callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # its lines are no events
    trainer.train()
    return callback.swarm


def train_by_lightning(
    task: Task, model: nn.Module, optimizer: Optimizer, samples: Samples, config: Config, swarm: Any
) -> murmuration.Swarm:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _number: int) -> Tensor:
            return task.loss(self.model, batch_of(batch))

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    callback = murmuration.lightning.LightningCallback(**swarm)
    Trainer(
        max_steps=config.run.steps,
        accelerator="cpu",
        callbacks=[callback],
        gradient_clip_val=config.inner.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(samples, batch_size=None))
    return callback.swarm


TRAINERS = {"transformers": train_by_transformers, "lightning": train_by_lightning}


def train(config: Config, arguments: dict[str, Any], trainer: str) -> dict[str, object]:
    """The inner steps of `worker.training.replica.InnerReplica`, written as people write them."""
    task, inner, steps = task_of(config), config.inner, config.run.steps
    model = task.model()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() >= 2]},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        fused=True,
    )
    samples = Samples(task, Cursor(seed=config.run.seed, stream=arguments["name"]))
    if trainer:
        swarm = TRAINERS[trainer](task, model, optimizer, samples, config, arguments)
        return ends_of(swarm, model)
    batches = iter(samples)
    with murmuration.Swarm(model, optimizer, **arguments) as swarm:
        while not swarm.done:
            batch = batch_of(next(batches))
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            swarm.report(loss)
            if inner.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            for group in optimizer.param_groups:
                group["lr"] = inner.lr_at(swarm.step + 1, steps)
            optimizer.step()
    return ends_of(swarm, model)


def ends_of(swarm: murmuration.Swarm, model: nn.Module) -> dict[str, object]:
    state, figures = unpacked(swarm.state_dict()), swarm.metrics
    fragments = state["fragments"]
    return {
        "run": Manifest(state["manifest"]).run,
        "anchor_hash": tensor_hash(each["anchor"] for each in fragments),
        "momentum_hash": tensor_hash(each["momentum"] for each in fragments),
        "model_hash": tensor_hash(p.detach() for p in model.parameters()),
        "rounds_completed": figures["rounds_completed"],
        "rounds_failed": figures["rounds_failed"],
    }


def peer(
    peer: Peer, task: dict[str, Any], settings: dict[str, Any], trainer: str = "", **arguments: Any
) -> dict[str, object]:
    """Runs such a peer to its end. Args: task: the TOML's sections of the run's daemon."""
    given = {**peer.arguments, **arguments, "settings": {**PATIENT, **settings}}
    return train(parse_config(task, "the test"), given, trainer)
