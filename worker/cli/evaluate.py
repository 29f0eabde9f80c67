"""`murmur evaluate`: held-out loss of a checkpoint, also without some of its stages."""

import math
from pathlib import Path

import click

from worker.errors import UsageError


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="CHECKPOINT")
@click.option(
    "--stages", type=click.IntRange(1), metavar="S", help="By default as many as the run had."
)
@click.option("--omit", metavar="2,3", help="Stages to leave out; never 0.")
@click.option(
    "--split", type=click.Choice(["train", "validation"]), default="validation", show_default=True
)
def evaluate(run: Path, stages: int | None, omit: str | None, split: str) -> int:
    """Print loss and perplexity of the newest anchor under the folder CHECKPOINT.

    Measured on as many batches as a run's report takes, and on the same ones. With --omit, what
    enters a stage that is left out goes on to the next as it is. Stages are cut as the run's were;
    into another number of them, by parameters.
    """
    from worker.training.evaluation import checkpoint_loss, find_checkpoint

    omitted = _numbers(omit) if omit is not None else []
    saved = find_checkpoint(run)
    loss = checkpoint_loss(saved, stages=stages, omitted=omitted, split=split)
    named = "stage" if len(omitted) == 1 else "stages"
    without = f", without {named} {', '.join(map(str, omitted))}" if omitted else ""
    click.echo(f"{saved.path}: {split} loss {loss:.4f}, perplexity {math.exp(loss):.2f}{without}")
    return 0


def _numbers(text: str) -> list[int]:
    """Of stages, in order. Raises UsageError."""
    try:
        return sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise UsageError(f"--omit {text}: write it like 2,3") from None
