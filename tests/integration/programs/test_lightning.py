"""Lightning's trainer as a peer: what it saves, how fast it learns, whose word is last, and
several optimizers."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import murmuration
from tests.support.peers import Peer, row, values
from tests.support.regression import (
    PRESETS,
    STEPS,
    H,
    Regression,
    check_rates,
    ends,
    rates_beside,
    rows,
    starts,
    swarm_of,
)

# What the library warns of by itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Lightning:
    """The library, imported when a test first uses it: that takes seconds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("lightning.pytorch"), name)


lightning = Lightning()


def module_of(make: Callable[[Any], Any] | None = None) -> Any:
    """The regression for Lightning; `make` gives its optimizers."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Regression()

        def training_step(self, batch: Any, _number: int) -> Tensor:
            loss = self.inner(*batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2) if make is None else make(self)

    return Module()


def fitted(
    folder: Path, module: Any, callbacks: list[Any], ckpt: str | None = None, **more: Any
) -> Any:
    given = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": False, **more}
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=str(folder),
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    trainer.fit(module, DataLoader(rows(), batch_size=8), ckpt_path=ckpt)
    return trainer


@row("Lightning resumes from its checkpoint", "shared", "to the same bits")
@pytest.mark.parametrize("preset", ["onebit", "prolonged"])
def test_lightning_resumes_to_the_same_bits(tmp_path, preset):
    longer = {"max_steps": 24} if preset == "prolonged" else {}
    preset = preset if preset in PRESETS else "streaming"

    def trained(ckpt: str | None = None, **more: Any) -> list[str]:
        keeps = lightning.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}"
        )
        callback, module = murmuration.lightning.LightningCallback(**swarm_of(preset)), module_of()
        given = {"enable_checkpointing": True, "max_steps": 16, **more}
        fitted(tmp_path, module, [callback, keeps], ckpt, **given)
        return ends(callback.swarm, module)

    whole = trained(**longer)
    assert trained(str(tmp_path / "step=8.ckpt"), **longer) == whole


def test_a_lightning_checkpoint_without_a_swarms_state_is_told(tmp_path, caplog):
    keeps = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{step}")
    fitted(tmp_path, module_of(), [keeps], enable_checkpointing=True, max_steps=8)
    callback = murmuration.lightning.LightningCallback(**swarm_of("diloco"))
    fitted(tmp_path, module_of(), [callback], str(tmp_path / "step=8.ckpt"), max_steps=16)
    assert "goes on from step 8, and its checkpoint has no state of a swarm" in caplog.text
    assert callback.swarm is not None
    assert callback.swarm.step == 8


def test_a_lightning_checkpoint_of_another_run_is_refused(tmp_path):
    keeps = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{step}")
    callback = murmuration.lightning.LightningCallback(**swarm_of("diloco"))
    fitted(tmp_path, module_of(), [callback, keeps], enable_checkpointing=True, max_steps=8)
    other = murmuration.lightning.LightningCallback(**swarm_of("diloco", inner_steps=5))
    with pytest.raises(murmuration.UsageError, match=r"diloco.inner_steps: 4 in it, 5 asked for"):
        fitted(tmp_path, module_of(), [other], str(tmp_path / "step=8.ckpt"), max_steps=16)


def starts_module(peer: Peer) -> None:
    starts(peer, module_of())


def rates_of_lightning(peer: Peer) -> dict[str, Any]:
    seen: dict[int, float] = {}

    class Rates(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            seen[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    def linear(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 60)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callback = murmuration.lightning.LightningCallback(**peer.arguments)
    trainer = fitted(peer.out, module_of(linear), [callback, Rates()], max_steps=60)
    return {"seen": seen, "end": trainer.global_step}


@row("Lightning that joins under way", "shared", "it goes on at the rate of the run")
def test_a_trainer_that_joins_goes_on_at_the_learning_rate_of_the_run(tmp_path):
    check_rates(rates_beside(tmp_path, starts_module, rates_of_lightning))


def gan() -> Any:
    """Two optimizers that the module steps by itself, one of them five times as often."""

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

        def training_step(self, batch: Any, number: int) -> None:
            generator, critic = self.optimizers()
            real, fake = batch[0], self.generator(torch.randn_like(batch[0]))
            loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
            self.toggle_optimizer(critic)
            critic.zero_grad()
            self.manual_backward(loss)
            critic.step()
            self.untoggle_optimizer(critic)
            if number % 5 == 4:
                generator.zero_grad()
                self.manual_backward(-self.critic(fake).mean())
                generator.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(each.parameters(), lr=1e-2)
                for each in (self.generator, self.critic)
            ]

    return Gan()


def fits_a_gan(peer: Peer) -> list[str]:
    callback = murmuration.lightning.LightningCallback(**peer.arguments, inner_steps=H)
    module = gan()
    fitted(peer.out, module, [callback], max_steps=-1, max_epochs=5)
    assert callback.swarm is not None
    assert callback.swarm.metrics["rounds_completed"]
    return ends(callback.swarm, module)


@row("Lightning with several optimizers, as a GAN", "shared", "they are followed as in a loop")
def test_a_module_with_two_optimizers_is_shared(tmp_path):
    first, second = values(tmp_path, fits_a_gan, fits_a_gan)
    assert first == second


@pytest.mark.parametrize("kind", ["ema", "swa", "swa with batch norm"])
def test_an_average_of_lightnings_stays(tmp_path, kind, caplog):
    module = module_of()
    if kind == "swa with batch norm":
        module.inner.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average: Any = (
        lightning.callbacks.EMAWeightAveraging(decay=0.9)
        if kind == "ema"
        else lightning.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    )
    callback = murmuration.lightning.LightningCallback(**swarm_of("diloco"))
    fitted(tmp_path, module, [average, callback], max_epochs=3, max_steps=-1)
    held = average._average_model
    held = held.module if kind == "ema" else held
    if kind != "swa with batch norm":  # Lightning itself takes one step more there
        for mine, theirs in zip(module.parameters(), held.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert callback.swarm is not None
    assert callback.swarm.step == 24
    assert "does not hold what the swarm agrees on" in caplog.text
