"""`murmur simulate`: the rounds of up to 10,000 peers on a virtual clock, and what they cost."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from murmuration.protos.figures import optional, percent, seconds, size
from murmuration.worker.cli.options import link_of
from murmuration.worker.errors import UsageError
from murmuration.worker.views.summary import text_table

if TYPE_CHECKING:
    from murmuration.worker.simulation import Figures, Scenario

_NUMBER = r"(\d+(?:\.\d+)?)"
# Options of two numbers: their form, an example, and what `Scenario` calls them.
_PAIRS = {
    "straggler": (f"{_NUMBER}x:{_NUMBER}", "5x:0.1", ("slow_factor", "slow_share")),
    "partition": (f"{_NUMBER}s:{_NUMBER}s", "10s:20s", None),
    "freeze": (f"{_NUMBER}:{_NUMBER}s", "0.1:60s", ("freeze_share", "freeze_s")),
}


@click.command()
@click.option(
    "--preset",
    "presets",
    type=click.Choice(["noloco", "diloco"]),
    multiple=True,
    default=("noloco",),
    show_default=True,
    help="The preset; may be given twice, to compare.",
)
@click.option(
    "--peers", default="4,16,64", show_default=True, metavar="N[,N...]", help="The sizes of swarms."
)
@click.option("--rounds", type=int, default=20, show_default=True, help="The rounds of every peer.")
@click.option(
    "--inner-steps", type=int, default=50, show_default=True, help="The inner steps between rounds."
)
@click.option(
    "--step-time", "step_s", type=float, default=0.1, show_default=True, help="Seconds a step."
)
@click.option(
    "--step-spread", type=float, default=0.0, help="The standard deviation over mean of a step."
)
@click.option(
    "--link",
    default="20mbit,delay=50ms",
    show_default=True,
    metavar="RATE[,delay=TIME][,jitter=TIME][,loss=PER_MINUTE]",
    help="The link of every peer; loss is in connections that break a minute.",
)
@click.option(
    "--latency-spread", type=float, default=0.0, help="The same of a message's delay, lognormal."
)
@click.option("--straggler", metavar="FACTORx:SHARE", help="Make peers slower; 5x:0.1: a tenth.")
@click.option("--partition", metavar="FROM:TO", help="Part the swarm; 10s:20s: for 10 s.")
@click.option(
    "--crash", "crash_share", type=float, default=0.0, help="The share of the peers that die."
)
@click.option("--freeze", metavar="SHARE:TIME", help="Stop peers; 0.1:60s: a tenth for 60 s.")
@click.option(
    "--group-size", type=int, default=2, show_default=True, help="The size of noloco's groups."
)
@click.option("--params", type=int, default=1_000_000, show_default=True, help="The parameters.")
@click.option("--codec", default="fp32", show_default=True, help="The codec of pseudo-gradients.")
@click.option("--merge", default="reset", show_default=True, help="The merge: reset or keep.")
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of all draws.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures.")
def simulate(presets: tuple[str, ...], peers: str, json_file: Path | None, **options: Any) -> None:
    """Simulate the rounds of many peers: time of a sync, idle time, spread of the replicas.

    Rounds run the code of a live worker; the network, the clock and the task are simulated. One
    seed gives one result."""
    try:
        counts = sorted({int(count) for count in peers.split(",")})
    except ValueError:
        raise UsageError(f"--peers {peers}: write it like 4,16,64") from None
    for name, (form, example, keys) in _PAIRS.items():
        if (text := options.pop(name)) is not None:
            if (found := re.fullmatch(form, text)) is None:
                raise UsageError(f"--{name} {text}: write it like {example}")
            pair = tuple(map(float, found.groups()))
            options |= dict(zip(keys, pair, strict=True)) if keys else {name: pair}
    options["link"] = link_of(options["link"])

    from murmuration.worker.simulation import Scenario, simulate as run

    try:
        scenarios = [
            Scenario(preset=preset, peers=count, **options)  # type: ignore[arg-type]  # click has checked the types
            for preset in dict.fromkeys(presets)
            for count in counts
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    results = []
    for scenario in scenarios:
        if sys.stderr.isatty():
            click.echo(f"{scenario.preset}, {scenario.peers:,} peers ...", err=True)
        results.append((scenario, run(scenario)))
    _print_runs(results)
    if json_file is not None:
        document = [
            {"scenario": asdict(given) | {"link": str(given.link)}, "figures": asdict(figures)}
            for given, figures in results
        ]
        try:
            json_file.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"--json {json_file}: {error.strerror or error}") from error


def _print_runs(runs: "Sequence[tuple[Scenario, Figures]]") -> None:
    heads = ("sync", "p99", "mean", "idle", "spread", "to optimum", "failed", "sent/round")
    for preset in dict.fromkeys(scenario.preset for scenario, _ in runs):
        figures = [found for scenario, found in runs if scenario.preset == preset]
        click.echo(text_table((preset, *heads), [_cells(found) for found in figures]))
        for found in figures:
            lines = [f"{count:,} failed, {reason}" for reason, count in found.reasons.items()]
            if found.half_applied:
                half = f"{found.half_applied:,} rounds"
                lines.append(f"{half} were applied by a part of their group only")
            if found.unfinished:
                lines.append(f"{found.unfinished:,} peers did not come to the end")
            for line in lines:
                click.echo(f"  {found.peers:,} peers: {line}")


def _cells(found: "Figures") -> tuple[str, ...]:
    return (
        f"{found.peers:,} peers",
        optional(found.sync_median_s, seconds),
        optional(found.sync_p99_s, seconds),
        optional(found.sync_mean_s, seconds),
        percent(found.idle_share, 1),
        f"{found.spread:.2g}",
        f"{found.distance:.2g}",
        percent(found.rounds_failed / max(1, found.rounds)),
        size(found.bytes_per_round),
    )
