"""Fine-tuning by seeds with real workers: what is exported, and who is refused."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from murmuration.worker.config import load_config, task_of
from murmuration.worker.training.checkpoint import load
from murmuration.worker.training.export import export
from tests.support.workers import SMALL, running_swarm, settings_of


def test_what_is_exported_is_the_first_values_moved_along_the_seeds(tmp_path: Path) -> None:
    task = task_of(load_config(None, SMALL[1::2], "kseed"))
    first = {name: value + 0.01 for name, value in task.model().state_dict().items()}
    init = tmp_path / "init.safetensors"
    save_file(first, init)
    settings = [*SMALL, *settings_of(run__steps=12, diloco__inner_steps=6, inner__seeds=8)]
    own = settings_of(task__init=f'"{init}"', run__evaluate_every=5)
    with running_swarm(2, tmp_path / "run", "--preset", "kseed", *settings, *own) as swarm:
        swarm.start_all()
        swarm.wait()
        saved, _ = load(swarm.out / "w0" / "checkpoints")
    ((name, coefficients),) = saved.named("anchor").items()
    assert coefficients.shape == (8,)
    assert coefficients.count_nonzero() > 0
    path, _ = export(tmp_path / "run" / "w0", tmp_path / "exported", "safetensors")
    values = load_file(path)
    assert values.keys() == first.keys()
    assert name.startswith("seed_space_of_")
    for parameter, value in moved(task.model(), first, coefficients).items():
        assert torch.allclose(values[parameter], value, atol=1e-5)


def moved(
    model: torch.nn.Module, first: dict[str, torch.Tensor], coefficients: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The sum, seed by seed."""
    total = {name: first[name].clone() for name, _ in model.named_parameters()}
    for seed, coefficient in enumerate(coefficients):
        generator = torch.Generator().manual_seed(seed)
        for value in total.values():
            value += coefficient * torch.randn(value.shape, generator=generator)
    return total
