"""Fine-tuning by `kseed` beside backpropagation: accuracy, and bytes of a round.

    python -m tests.lab kseed [--steps 600] [--pretrain 1500] [--workers 4] [--seeds 1]
        [--lr 1e-3 3e-3] [--kseed-lr 1e-4 3e-4 1e-3] [--results runs/kseed.jsonl]

One worker trains a language model of 175 thousand parameters on the sources of Python's library.
Then a swarm teaches it to tell whether 63 bytes are of these or of torch's C++ headers: the answer
is the byte that the model gives the greater probability to, P or C. All swarms go on from the same
values and see the same samples, with the best of the learning rates that each was given, by the
loss on a seed of its own. Everything is `tests/support/specification.py`, in one process each; real
workers end with the same bits. Finished runs are lines of the results file: delete it when numerics
have changed, and the pretrained values beside it. Prints Markdown.
"""

import argparse
import hashlib
import json
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.training.evaluation import Evaluation, validate
from tests.lab.one_process import Trained, Training, train

TUNING_SEED = 100
_SIZES: dict[str, object] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
_CONTEXT = 64
_ANSWERS = torch.tensor([ord("P"), ord("C")])
_TASK = 'task.name="tests.lab.kseed:Origin"'
_BACKPROP = ("diloco", "local")


class Origin:
    """Whether a piece of text is Python or C++, asked of a model of bytes."""

    def __init__(self, *, seed: int, batch_size: int = 8) -> None:
        headers = str(Path(torch.__file__).parent / "include" / "ATen" / "ops" / "*.h")
        self._texts = [
            LlamaBytes(
                seed=seed,
                text=text,
                batch_size=batch_size,
                context_bytes=_CONTEXT,
                architecture=_SIZES,
            )
            for text in ("stdlib", headers)
        ]

    def model(self) -> nn.Module:
        return self._texts[0].model()

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        """As many pieces of each; the last byte is a question mark."""
        sources = [text.batches(split, cursor) for text in self._texts]
        while True:
            python, cpp = (next(source) for source in sources)
            inputs = torch.cat([python.inputs, cpp.inputs])
            inputs[:, -1] = ord("?")
            targets = torch.arange(2).repeat_interleave(len(python.inputs))
            yield Batch(inputs, targets, python.cursor)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.inputs)[:, -1, _ANSWERS]
        return nn.functional.cross_entropy(logits, batch.targets)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        chosen = model(batch.inputs)[:, -1, _ANSWERS].argmax(dim=-1)
        return {"accuracy": (chosen == batch.targets).float().mean()}


@dataclass(frozen=True)
class Run:
    """One fine-tuning. Args: init: values to go on from."""

    preset: str
    lr: float
    seed: int
    steps: int
    workers: int
    init: str

    @property
    def training(self) -> Training:
        settings = (_TASK, f"inner.lr={self.lr}", 'inner.schedule="constant"')
        return Training(
            preset=self.preset,
            settings=(*settings, f'task.init="{self.init}"', "inner.warmup_steps=0"),
            steps=self.steps,
            workers=self.workers,
            seed=self.seed,
        )

    @property
    def key(self) -> str:
        config = self.training.config
        told = {**asdict(self), "plan": asdict(config.plan), "inner": asdict(config.inner)}
        told["init"] = Path(self.init).name  # which says of how many steps; the folder may move
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """Args: round_bytes: that a worker sends in a round, before zstd."""

    loss: float
    accuracy: float
    round_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pretrain", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kseed-lr", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--results", type=Path, default=Path("runs/kseed.jsonl"))
    parser.add_argument("--processes", type=int, help="by default as many as there are cores")
    options = parser.parse_args()
    init = pretrained(options.results.parent, options.pretrain)
    rates = {"kseed": options.kseed_lr, **dict.fromkeys(_BACKPROP, options.lr)}
    done = known(options.results)

    def run(preset: str, lr: float, seed: int) -> Run:
        return Run(preset, lr, seed, options.steps, options.workers, str(init))

    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:

        def finished(runs: Sequence[Run]) -> list[Result]:
            missing = [each for each in runs if each.key not in done]
            for each, result in pool.imap_unordered(tune, missing):
                done[each.key] = result
                with options.results.open("a") as lines:
                    lines.write(json.dumps({"key": each.key, **asdict(result)}) + "\n")
            return [done[each.key] for each in runs]

        finished([run(p, lr, TUNING_SEED) for p, lrs in rates.items() for lr in lrs])
        best = {
            preset: min(lrs, key=lambda lr, p=preset: done[run(p, lr, TUNING_SEED).key].loss)
            for preset, lrs in rates.items()
        }
        found = {
            preset: finished([run(preset, lr, seed) for seed in range(options.seeds)])
            for preset, lr in best.items()
        }
    print(table(found, best, before(init)))


def pretrained(folder: Path, steps: int) -> Path:
    """Values of a language model, made once."""
    path = folder / f"kseed-pretrained-{steps}.safetensors"
    if not path.exists():
        sizes = ",".join(f"{key}={value}" for key, value in _SIZES.items())
        settings = (f"task.architecture={{{sizes}}}", f"task.context_bytes={_CONTEXT}")
        training = Training(preset="local", settings=settings, steps=steps, workers=1, seed=0)
        trained = train(training)
        loaded(trained)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trained.replica.model.state_dict(), path)
    return path


def loaded(trained: Trained) -> None:
    """Puts what a run ended with into its model."""
    for fragment, anchor in zip(trained.fragments, trained.anchors(), strict=True):
        for name, value in fragment.views(anchor).items():
            trained.replica.parameters[name].copy_(value)


def known(path: Path) -> dict[str, Result]:
    """What the file has."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {told.pop("key"): Result(**told) for told in lines}


def tune(run: Run) -> tuple[Run, Result]:
    """One fine-tuning to its end."""
    trained = train(run.training)
    loaded(trained)
    found = validate(trained.task, trained.replica.model, run.seed)
    assert found is not None, "there is no limit of time"
    rounds = max(1, trained.plan.schedule(fragments=1, steps=run.steps).rounds(0))
    return run, Result(found.loss, found.metrics["accuracy"], trained.sent.bytes / rounds)


def before(init: Path) -> Evaluation:
    """What the values are worth that all go on from."""
    task = Origin(seed=0)
    model = task.model()
    model.load_state_dict(load_file(init))
    found = validate(task, model, 0)
    assert found is not None, "there is no limit of time"
    return found


def table(
    found: Mapping[str, Sequence[Result]], best: Mapping[str, float], start: Evaluation
) -> str:
    """Markdown."""
    lines = [
        "| plan | inner lr | sent per worker and round: 2 (n-1)/n vectors | loss | accuracy |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| before | - | - | {start.loss:.3f} | {100 * start.metrics['accuracy']:.1f} % |",
    ]
    for preset, results in found.items():
        loss, accuracy = (
            statistics.fmean(getattr(each, name) for each in results)
            for name in ("loss", "accuracy")
        )
        sent = f"{results[0].round_bytes / 1e3:,.1f} kB" if results[0].round_bytes else "-"
        lines.append(
            f"| `{preset}` | {best[preset]:g} | {sent} | {loss:.3f} | {100 * accuracy:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
