"""`murmur plan`: what a run's settings cost on a link, and which ones would reach a target."""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from murmuration.protos.figures import count
from murmuration.worker.cli.options import link_of, option, options, preset_option, settings_option
from murmuration.worker.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from murmuration.algorithms.plan import Plan
    from murmuration.algorithms.utilization import Workload
    from murmuration.worker.config import Config

_ABOVE_0 = click.FloatRange(min=0, min_open=True)
_FROM_1 = click.IntRange(1)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    links: tuple[str, ...] = option(
        "--links",
        "--link",
        multiple=True,
        required=True,
        metavar="RATE[,delay=TIME][,jitter=TIME]",
        help="A worker's link, such as 20mbit,delay=50ms; may be given several times.",
    )
    peers: int = option(
        "--peers", type=click.IntRange(2), default=4, show_default=True, help="The workers."
    )
    preset: str | None = preset_option
    settings: tuple[str, ...] = settings_option
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


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@options("given", PlanOptions)
def plan(run: Path | None, given: PlanOptions) -> None:
    """Predict how much of the time workers compute on a link, and propose settings.

    RUN is the run's TOML file. Without one the defaults are taken. Everything is simulated: no
    worker is started and nothing is sent."""
    from murmuration.worker.config import load_config

    config = load_config(run, given.settings, given.preset)
    if config.stages.count > 1:
        raise UsageError(
            f"stages.count = {config.stages.count}: a model in stages is not predicted; leave the "
            "stages out with --set stages.count=1 to plan its exchange alone"
        )
    links = [link_of(text) for text in given.links]
    _check_numbers(given)

    from murmuration.worker.cli.plan_report import found_for, print_report

    name, workload, step_source = _model(config, given)
    plans = _plans(config, run, given.settings)
    try:
        found = [
            found_for(link, workload, given.peers, config.plan, plans, given.target)
            for link in links
        ]
    except ValueError as error:
        where = config.source.of_named("diloco", str(error))
        raise ConfigError(f"{where}: [diloco] {error}") from error
    report = {
        "task": name,
        "layers": len(workload.layers),
        "parameters": workload.parameters,
        "parameters_outside_layers": workload.outside,
        "ddp_parameters": workload.ddp_parameters or workload.parameters,
        "step_s": workload.step_s,
        "step_source": step_source,
        "peers": given.peers,
        "target": given.target,
        "preset": config.preset,
        "plan": asdict(config.plan),
        "links": found,
    }
    if given.as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        print_report(report, workload)


def _check_numbers(given: PlanOptions) -> None:
    for flag, value in (("--step-time", given.step_s), ("--target", given.target)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{flag} is {value}; it must be a finite number")
    if (given.params is None) != (given.layers is None):
        have, lack = ("params", "layers") if given.layers is None else ("layers", "params")
        raise UsageError(f"--{have} needs --{lack}: together they stand for the run's own model")
    if given.params is None or given.layers is None:
        return
    if given.step_s is None:
        raise UsageError(
            "--params and --layers describe a model that cannot be timed here; add --step-time"
        )
    if given.layers > given.params:
        raise UsageError(f"--layers {given.layers} is more than --params {given.params}")


def _plans(config: "Config", run: Path | None, given: tuple[str, ...]) -> "dict[str, list[Plan]]":
    """The plans of each preset, one for each H, with this file and these settings.

    The run's own comes first: of equals it is proposed. Pairs, or another inner optimizer, are
    proposed only to a run that has chosen them."""
    from murmuration.algorithms.plan import PRESETS
    from murmuration.algorithms.utilization import PERIODS
    from murmuration.worker.config import load_config

    plans: dict[str, dict[Plan, None]] = {}
    for preset in dict.fromkeys([config.preset, *PRESETS]):
        plans[preset] = {}
        for period in PERIODS:
            with suppress(ConfigError):  # the run's own settings do not go with this preset, or H
                other = load_config(run, (*given, f"diloco.inner_steps={period}"), preset)
                paired = other.plan.exchange == "pairs" and config.plan.exchange != "pairs"
                if other.inner == config.inner and not paired:
                    plans[preset][other.plan] = None
    return {preset: list(found) for preset, found in plans.items()}


def _model(config: "Config", given: PlanOptions) -> "tuple[str, Workload, str]":
    """Its name, its workload (with `kseed` of coefficients), and where its step's time is from."""
    from murmuration.algorithms.utilization import Workload
    from murmuration.worker.training.optimizers import KSEED

    if given.params is None or given.layers is None or given.step_s is None:
        from murmuration.worker.cli.plan_report import run_workload

        threads = "one thread" if given.threads == 1 else count(given.threads, "thread")
        source = f"measured on this machine, {threads}" if given.step_s is None else "as given"
        return config.task.name, run_workload(config, given.step_s, given.threads), source
    small, larger = divmod(given.params, given.layers)
    sizes = tuple(small + (index < larger) for index in range(given.layers))
    workload = Workload(step_s=given.step_s, layers=sizes)
    if config.inner.optimizer == KSEED:
        workload = replace(workload, layers=(config.inner.seeds,), ddp_parameters=given.params)
    return "this model", workload, "as given"
