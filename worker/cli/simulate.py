"""`murmur simulate`: the rounds of up to 10,000 peers on a virtual clock, and what they cost."""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from murmuration.protos.figures import optional, percent, seconds, size
from murmuration.worker.cli.options import link_of, write_file
from murmuration.worker.errors import UsageError
from murmuration.worker.views.summary import text_table

if TYPE_CHECKING:
    from murmuration.worker.simulation import Figures, Scenario

    Runs = Sequence[tuple[Scenario, Figures]]

_NUMBER = r"(\d+(?:\.\d+)?)"
_STRAGGLERS = re.compile(_NUMBER + "x:" + _NUMBER)
_SECONDS = re.compile(_NUMBER + "s:" + _NUMBER + "s")
_FREEZES = re.compile(_NUMBER + ":" + _NUMBER + "s")


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
def simulate(
    presets: tuple[str, ...],
    peers: str,
    json_file: Path | None,
    **options: Any,
) -> int:
    """Simulate the rounds of many peers: time of a sync, idle time, spread of the replicas.

    Rounds run the code of a live worker; the network, the clock and the task are simulated. One
    seed gives one result.
    """
    counts = _counts(peers)
    settings = _settings(options)

    from murmuration.worker.simulation import Scenario
    from murmuration.worker.simulation import simulate as run

    try:
        scenarios = [
            Scenario(preset=preset, peers=count, **settings)  # type: ignore[arg-type]  # click has checked the types
            for preset in dict.fromkeys(presets)
            for count in counts
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    results = []
    for scenario in scenarios:
        _progress(scenario)
        results.append((scenario, run(scenario)))
    print_runs(results)
    if json_file is not None:
        document = [
            {"scenario": _document(scenario), "figures": dataclasses.asdict(figures)}
            for scenario, figures in results
        ]
        text = json.dumps(document, indent=1) + "\n"
        write_file("--json", json_file, lambda path: path.write_text(text))
    return 0


def _counts(text: str) -> list[int]:
    try:
        return sorted({int(count) for count in text.split(",")})
    except ValueError:
        raise UsageError(f"--peers {text}: write it like 4,16,64") from None


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `Scenario` takes them. Raises UsageError."""
    straggler, partition = options.pop("straggler"), options.pop("partition")
    freeze, link = options.pop("freeze"), options.pop("link")
    if straggler is not None:
        factor, share = _pair("--straggler", straggler, _STRAGGLERS, "5x:0.1")
        options |= {"slow_factor": factor, "slow_share": share}
    if partition is not None:
        options["partition"] = _pair("--partition", partition, _SECONDS, "10s:20s")
    if freeze is not None:
        share, freeze_s = _pair("--freeze", freeze, _FREEZES, "0.1:60s")
        options |= {"freeze_share": share, "freeze_s": freeze_s}
    options["link"] = link_of(link)
    return options


def _pair(name: str, text: str, form: re.Pattern[str], example: str) -> tuple[float, float]:
    found = form.fullmatch(text)
    if found is None:
        raise UsageError(f"{name} {text}: write it like {example}")
    return float(found.group(1)), float(found.group(2))


def _document(scenario: "Scenario") -> dict[str, Any]:
    return dataclasses.asdict(scenario) | {"link": str(scenario.link)}


def _progress(scenario: "Scenario") -> None:
    if sys.stderr.isatty():
        click.echo(f"{scenario.preset}, {scenario.peers:,} peers ...", err=True)


def print_runs(runs: "Runs") -> None:
    """A table for each preset, and below it why rounds were given up."""
    heads = ("sync", "p99", "mean", "idle")
    more = ("spread", "to optimum", "failed", "sent/round")
    for preset, of_preset in _by_preset(runs).items():
        rows = [_cells(found) for _, found in of_preset]
        click.echo(text_table((preset, *heads, *more), rows))
        for _, found in of_preset:
            for line in _troubles(found):
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


def _troubles(found: "Figures") -> list[str]:
    lines = [f"{count:,} failed, {reason}" for reason, count in found.reasons.items()]
    if found.half_applied:
        lines.append(f"{found.half_applied:,} rounds were applied by a part of their group only")
    if found.unfinished:
        lines.append(f"{found.unfinished:,} peers did not come to the end")
    return lines


def _by_preset(runs: "Runs") -> "dict[str, Runs]":
    presets = dict.fromkeys(scenario.preset for scenario, _ in runs)
    return {name: [run for run in runs if run[0].preset == name] for name in presets}
