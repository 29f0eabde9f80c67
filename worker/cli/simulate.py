"""`murmur simulate`: the rounds of up to 10,000 peers on a virtual clock, and what they cost."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker.errors import UsageError

if TYPE_CHECKING:
    from worker.simulation import Scenario

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
    help="May be given twice, to compare.",
)
@click.option("--peers", default="4,16,64", show_default=True, metavar="N[,N...]")
@click.option("--rounds", type=int, default=20, show_default=True, help="Of every peer.")
@click.option("--inner-steps", type=int, default=50, show_default=True, help="H.")
@click.option(
    "--step-time", "step_s", type=float, default=0.1, show_default=True, metavar="SECONDS"
)
@click.option(
    "--step-spread", type=float, default=0.0, help="Standard deviation over mean of a step's time."
)
@click.option(
    "--link",
    default="20mbit,delay=50ms",
    show_default=True,
    metavar="RATE[,delay=TIME][,jitter=TIME][,loss=PER_MINUTE]",
    help="Of every peer; loss: connections that break a minute.",
)
@click.option(
    "--latency-spread", type=float, default=0.0, help="The same of a message's delay, lognormal."
)
@click.option("--straggler", metavar="FACTORx:SHARE", help="5x:0.1: a tenth is five times slower.")
@click.option("--dylu", is_flag=True, help="Stragglers take fewer inner steps instead.")
@click.option("--partition", metavar="FROM:TO", help="10s:20s: two halves from 10 s to 20 s.")
@click.option("--crash", "crash_share", type=float, default=0.0, help="Share of peers that die.")
@click.option("--freeze", metavar="SHARE:TIME", help="0.1:60s: a tenth stands still for a minute.")
@click.option(
    "--group-size", type=int, default=2, show_default=True, help="Of noloco; 2 is a pair."
)
@click.option("--params", type=int, default=1_000_000, show_default=True)
@click.option("--codec", default="fp32", show_default=True, help="Of pseudo-gradients.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes all figures.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Writes a PNG.")
def simulate(
    presets: tuple[str, ...],
    peers: str,
    json_file: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> int:
    """Simulate the rounds of many peers: time of a sync, idle time, spread of the replicas.

    The state machines are those that run live; the network, the clock and the task are not. One
    seed gives one result.
    """
    counts = _counts(peers)
    settings = _settings(options)

    from worker.cli.simulate_report import draw, print_runs
    from worker.simulation import Scenario
    from worker.simulation import simulate as run

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
        _write("--json", json_file, lambda path: _write_text(path, text))
    if plot_file is not None:
        _write("--plot", plot_file, lambda path: draw(path, results))
    return 0


def _counts(text: str) -> list[int]:
    try:
        return sorted({int(count) for count in text.split(",")})
    except ValueError:
        raise UsageError(f"--peers {text}: write it like 4,16,64") from None


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """The options as `Scenario` takes them. Raises UsageError."""
    from algorithms.link import parse_link

    straggler, partition = options.pop("straggler"), options.pop("partition")
    freeze, link = options.pop("freeze"), options.pop("link")
    if straggler is not None:
        factor, share = _pair("--straggler", straggler, _STRAGGLERS, "5x:0.1")
        options |= {"slow_factor": factor, "slow_share": share}
    elif options["dylu"]:
        raise UsageError("--dylu is for stragglers; add --straggler, such as 5x:0.1")
    if partition is not None:
        options["partition"] = _pair("--partition", partition, _SECONDS, "10s:20s")
    if freeze is not None:
        share, freeze_s = _pair("--freeze", freeze, _FREEZES, "0.1:60s")
        options |= {"freeze_share": share, "freeze_s": freeze_s}
    try:
        options["link"] = parse_link(link)
    except ValueError as error:
        raise UsageError(f"--link: {error}") from error
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


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _write(option: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from error
