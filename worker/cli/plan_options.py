"""What `murmur plan` can be asked."""

from dataclasses import dataclass
from pathlib import Path

import click

from murmuration.protos.figures import count
from murmuration.worker.cli.options import option
from murmuration.worker.errors import UsageError

_ABOVE_0 = click.FloatRange(min=0, min_open=True)
_FROM_1 = click.IntRange(1)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command's options, those of `--stages` aside."""

    links: tuple[str, ...] = option(
        "--links",
        "--link",
        multiple=True,
        required=True,
        metavar="RATE[,delay=TIME][,jitter=TIME]",
        help="A worker's link, such as 20mbit,delay=50ms; may be given several times. With "
        "--stages the links of all peers, or a FILE.json of measurements.",
    )
    peers: int = option("--peers", type=click.IntRange(2), default=4, show_default=True)
    preset: str | None = option("--preset", help="The preset, such as diloco.")
    settings: tuple[str, ...] = option("--set", multiple=True, metavar="SECTION.KEY=VALUE")
    target: float = option(
        "--target",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        default=0.95,
        show_default=True,
        help="Propose settings with which workers compute for this share of the time.",
    )
    step_s: float | None = option(
        "--step-time",
        type=_ABOVE_0,
        metavar="SECONDS",
        help="The seconds of one inner step.  [default: some are timed here]",
    )
    params: int | None = option("--params", type=_FROM_1, help="Plan for this many parameters.")
    layers: int | None = option("--layers", type=_FROM_1, help="Plan for this many layers.")
    threads: int = option(
        "--threads", type=_FROM_1, default=1, show_default=True, help="Time with this many threads."
    )
    as_json: bool = option("--json", is_flag=True, help="Print one JSON object.")

    @property
    def time_source(self) -> str:
        """Where the times come from that are measured with these options."""
        threads = "one thread" if self.threads == 1 else count(self.threads, "thread")
        return f"measured on this machine, {threads}"

    @property
    def measurements(self) -> Path | None:
        """The file of measurements, if there is one. Raises UsageError: other links beside it."""
        files = [text for text in self.links if text.endswith(".json")]
        if files and len(self.links) > 1:
            raise UsageError(f"--links {files[0]} has all links; leave the other --links out")
        return Path(files[0]) if files else None


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """The options of `--stages`; None where the file or a default says it."""

    stages: int | None = option("--stages", type=_FROM_1, help="Cut the model into stages.")
    replicas: int | None = option("--replicas", type=_FROM_1, help="The replicas of each stage; 2.")
    skip: float | None = option(
        "--skip",
        type=click.FloatRange(0, 1, max_open=True),
        help="Leave this share of the stages out of each route; 0.25.",
    )
    spread: int | None = option(
        "--spread",
        type=click.IntRange(0),
        help="Let half of such routes visit this many stages more, and the others fewer; 0.",
    )
    microbatches: int | None = option(
        "--microbatches", type=_FROM_1, help="The microbatches of each origin; 8."
    )
    memory: int | None = option(
        "--memory", type=_FROM_1, help="The microbatches that a peer may hold; 3."
    )
    stage_mib: float | None = option(
        "--stage-mib", type=_ABOVE_0, help="The memory of a peer for its stage."
    )
    forward_ms: float | None = option(
        "--forward-ms", type=_ABOVE_0, help="The time of one forward; else timed here."
    )
    activation_bytes: int | None = option(
        "--activation-bytes", type=_FROM_1, help="The bytes of a microbatch."
    )
    activations: str | None = option(
        "--activations",
        type=click.Choice(("bf16", "fp32", "int8")),
        help="The type of activations.",
    )
    model: str | None = option("--model", help="The model: tiny, small or base.")
    seed: int | None = option(
        "--seed", type=click.IntRange(0), help="The seed of searches and draws; 0."
    )

    @property
    def said(self) -> dict[str, str]:
        """What they say of the run, as settings, and how each was typed."""
        said = {}
        if self.stages is not None:
            said[f"stages.count={self.stages}"] = f"--stages {self.stages}"
        if self.model is not None:
            said[f'task.model="{self.model}"'] = f"--model {self.model}"
        return said

    def recuts(self, file_count: object) -> bool:
        """Whether they cut the model into other stages than the run's file, if it says a count."""
        return self.stages is not None and file_count not in (None, self.stages)
