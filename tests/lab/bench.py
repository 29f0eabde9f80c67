"""Presets, PyTorch's DDP, torchft and hivemind on links of several speeds: loss, time, bytes.

    python -m tests.lab bench [--link 20mbit ...] [--preset NAME ...] [--peers NAME] [--steps 400]
    make bench ARGS="..."    # the same

What is heavy to import is imported where it is needed.
"""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from murmuration.coordinator import Failure
from murmuration.protos.exit_codes import ExitCode
from tests.lab.compare.options import MEANS, SYSTEMS

if TYPE_CHECKING:
    from tests.lab.compare.options import Bench


@click.command()
@click.option(
    "--link",
    "links",
    multiple=True,
    metavar="LINK",
    help="As 20mbit or 20mbit,delay=50ms,loss=0.1 (connections that break a minute); a table "
    "for each.  [default: 2, 20, 100, 1000mbit]",
)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="NAME",
    help="Besides local, which all are held against.  [default: ddp, diloco, streaming]",
)
@click.option(
    "--peers",
    multiple=True,
    type=click.Choice(("auto", "none", *SYSTEMS)),
    default=("auto",),
    show_default=True,
    help="Other systems; auto: all that are installed (`make .venv-peers/.ready`).",
)
@click.option("--workers", type=click.IntRange(2, 64), default=4, show_default=True)
@click.option("--steps", type=int, default=400, show_default=True, help="Inner steps of each run.")
@click.option(
    "--inner-steps",
    type=int,
    metavar="H",
    help="Inner steps between rounds.  [default: each preset's own]",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any config key.")
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Runs that would train longer are cut to fewer steps, and extrapolated.",
)
@click.option("--link-means", type=click.Choice(MEANS), default="auto", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="The runs, tables and figure.  [default: runs/bench-TIME]",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--markdown",
    "markdown_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The tables for a README.",
)
def bench(json_path: Path | None, markdown_path: Path | None, **asked: Any) -> None:
    """Compare presets, PyTorch's DDP, torchft and hivemind on links of several speeds.

    Trains the same model on the same samples with each, on worker processes of this machine, and
    prints a table per link. Ctrl-C ends the run in hand and prints what was measured.
    """
    from tests.lab.compare.session import run_bench

    chosen = _bench(**asked)
    chosen.check()
    for path in filter(None, (json_path, markdown_path)):
        if not path.parent.is_dir():
            raise Failure(
                f"{path}: there is no folder {path.parent}; make it first", ExitCode.USAGE
            )
    from murmuration.worker.config import load_config

    if any(load_config(None, chosen.settings, name).stages.count != 1 for name in chosen.order):
        raise Failure(
            "--set stages.count: whole models are compared here; leave it out",
            ExitCode.CONFIGURATION,
        )
    # As for every worker: torch's threads are not all that is counted in OMP_NUM_THREADS.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run_bench(chosen, json_path, markdown_path))


def _bench(
    peers: tuple[str, ...],
    links: tuple[str, ...],
    presets: tuple[str, ...],
    out: Path | None,
    **others: Any,
) -> "Bench":
    """Raises Failure."""
    from tests.lab.compare.options import LINKS, PRESETS, Bench
    from tests.lab.compare.runs import in_checkout

    if "none" in peers and len(set(peers)) > 1:
        raise Failure("--peers none: none, and others as well; leave one out", ExitCode.USAGE)
    systems = tuple(name for name in SYSTEMS if name in peers)
    if "auto" in peers and in_checkout(Path()):
        systems = SYSTEMS
    return Bench(
        links=links or LINKS,
        presets=presets or PRESETS,
        systems=systems,
        out=out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}",
        **others,
    )


if __name__ == "__main__":
    bench()
