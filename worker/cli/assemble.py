"""`murmur assemble`: one checkpoint of a whole model from those of its stages."""

from pathlib import Path

import click

from worker.errors import UsageError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the checkpoint goes.  [default: RUN/assembled]",
)
def assemble(run: Path, out: Path | None) -> int:
    """Put the newest checkpoints of all stages below the folder RUN together.

    A run that ends in good order has done so already, in the folder of one of its workers; this is
    for one that was cut off. Where its newest checkpoints are of different steps, a warning says
    which. `murmur generate` and `murmur evaluate` take what comes of it.
    """
    from worker.pipeline.assembly import assemble as assemble_stages

    out = out or run / "assembled"
    try:
        assembled = assemble_stages(run, out)
    except OSError as error:
        raise UsageError(
            f"--out {out}: no checkpoint can be written there: {error}; choose another folder"
        ) from error
    if len(set(assembled.steps.values())) > 1:
        told = ", ".join(f"{stage} -> {step}" for stage, step in assembled.steps.items())
        click.echo(
            f"warning: the newest checkpoints of the stages are of different steps "
            f"(stage -> step: {told}); the model is a mixture, named after the least",
            err=True,
        )
    click.echo(assembled.path)
    return 0
