"""What `murmur plan` takes on the command line for a model in stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from worker.config import Config

_ACTIVATIONS = ("bf16", "fp32", "int8")
# What a run's file says of its own count of stages only, unsaid.
NOT_OF_OTHER_COUNTS = ("stages.layers=[]", "stages.skip=0", "stages.spread=0")


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """The options of `--stages`, as click reads them; None where the file or a default says it."""

    stages: int | None
    replicas: int | None
    skip: float | None
    spread: int | None
    microbatches: int | None
    memory: int | None
    stage_mib: float | None
    forward_ms: float | None
    activation_bytes: int | None
    activations: str | None
    model: str | None
    shared_uplinks: bool | None
    effort_s: float | None
    seed: int | None
    plot_file: Path | None

    @property
    def said(self) -> dict[str, str]:
        """What they say of the run, as settings, and how each was typed."""
        said = {}
        if self.stages is not None:
            said[f"stages.count={self.stages}"] = f"--stages {self.stages}"
        if self.model is not None:
            said[f'task.model="{self.model}"'] = f"--model {self.model}"
        return said

    def recuts(self, count: object) -> bool:
        """Whether they cut the model into other stages than the run's file, which says `count`."""
        return self.stages is not None and count not in (None, self.stages)

    def given(self) -> list[str]:
        """Those that are on the command line, as typed there."""
        renamed = {"effort_s": "effort", "plot_file": "plot"}
        return [
            "--" + renamed.get(name, name).replace("_", "-")
            for name, value in vars(self).items()
            if value is not None
        ]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What `murmur plan` is given with and without `--stages`.

    Args:
        config: of the run.
        recut: whether `--stages` is another count than that of the run's file.
        links, threads, as_json: the options.
    """

    config: "Config"
    recut: bool
    links: tuple[str, ...]
    threads: int
    as_json: bool


def stage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `--stages`; StageOptions has their defaults."""
    above_0 = click.FloatRange(min=0, min_open=True)
    for option in reversed(
        (
            click.option("--stages", type=click.IntRange(1), help="Cut the model into so many."),
            click.option("--replicas", type=click.IntRange(1), help="Of each stage; 2."),
            click.option(
                "--skip",
                type=click.FloatRange(0, 1, max_open=True),
                help="Share of the stages that a route leaves out; 0.25.",
            ),
            click.option(
                "--spread",
                type=click.IntRange(0),
                help="Stages that half of such routes visit more, and the others fewer; 0.",
            ),
            click.option(
                "--microbatches", type=click.IntRange(1), help="Of each origin in an iteration; 8."
            ),
            click.option(
                "--memory", type=click.IntRange(1), help="Microbatches that a peer may hold; 3."
            ),
            click.option(
                "--stage-mib", type=above_0, help="Memory of a peer for its stage; bounds the cut."
            ),
            click.option("--forward-ms", type=above_0, help="Of a visit; by default timed here."),
            click.option("--activation-bytes", type=click.IntRange(1), help="Of a microbatch."),
            click.option("--activations", type=click.Choice(_ACTIVATIONS), help="bf16 by default."),
            click.option("--model", help="Short for --set task.model=...: tiny, small or base."),
            click.option(
                "--shared-uplinks/--own-uplinks",
                default=None,
                help="Whether a peer's messages leave one after another, as a run plans; shared.",
            ),
            click.option(
                "--effort", "effort_s", type=above_0, metavar="SECONDS", help="Of the search; 2."
            ),
            click.option("--seed", type=click.IntRange(0), help="Of searches and draws; 0."),
            click.option(
                "--plot", "plot_file", type=click.Path(path_type=Path), help="Draws the schedule."
            ),
        )
    ):
        command = option(command)
    return command


def is_staged(links: Sequence[str], options: StageOptions) -> bool:
    """Whether the command line asks for stages."""
    return options.stages is not None or any(map(is_file, links))


def is_file(link: str) -> bool:
    """Whether what --links gives is a file of measurements rather than a link."""
    return link.endswith(".json")
