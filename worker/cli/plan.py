"""`murmur plan`: what a run's settings cost on a link, and which ones would reach a target."""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from worker.cli.plan_stages import plan_stages
from worker.cli.plan_stages_options import (
    NOT_OF_OTHER_COUNTS,
    Shared,
    StageOptions,
    is_staged,
    stage_options,
)
from worker.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from algorithms.link import Link
    from algorithms.plan import Plan
    from algorithms.utilization import Workload
    from worker.cli.plan_report import Answer
    from worker.config import Config

_SPEED_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
_UNTIMED_STEPS, _FEWEST_STEPS, _MOST_STEPS, _TIMED_S = 3, 5, 100, 1.0


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The command's options, as click reads them."""

    links: tuple[str, ...]
    peers: int
    preset: str | None
    settings: tuple[str, ...]
    target: float
    step_s: float | None
    params: int | None
    layers: int | None
    threads: int
    as_json: bool


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option(
    "--links",
    "--link",
    multiple=True,
    required=True,
    metavar="RATE[,delay=TIME][,jitter=TIME]",
    help="A worker's link, such as 20mbit,delay=50ms; may be given several times. With --stages "
    "those of all peers, or a FILE.json of measurements.",
)
@click.option("--peers", type=click.IntRange(2), default=4, show_default=True)
@click.option("--preset", help="diloco, ddp, ...; the file's by default.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE")
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Share of the time that workers shall compute.",
)
@click.option(
    "--step-time",
    "step_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Of one inner step; by default some are timed here.",
)
@click.option("--params", type=click.IntRange(1), help="Of another model than the run's.")
@click.option("--layers", type=click.IntRange(1), help="Of that model.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="To time on.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@stage_options
def plan(run: Path | None, **options: Any) -> int:
    """Predict how much of the time workers compute on a link, and propose settings.

    RUN is the run's TOML file; without one the defaults are taken. Everything is simulated: no
    worker is started and nothing is sent.

    With --stages the model is cut into stages on several peers: predicts the iteration time of
    each routing, and proposes which peer serves which stage.
    """
    staged = StageOptions(**{field.name: options.pop(field.name) for field in fields(StageOptions)})
    given = _Given(**options)
    from worker.config import file_says, load_config

    recut = staged.recuts(file_says(run, "stages", "count"))
    unsaid = dict.fromkeys(NOT_OF_OTHER_COUNTS, f"--stages {staged.stages}") if recut else {}
    settings = (*unsaid, *given.settings, *staged.said)
    config = load_config(run, settings, given.preset, {**unsaid, **staged.said})
    if is_staged(given.links, staged) or config.stages.count > 1:
        _check_staged()
        shared = Shared(
            config=config,
            recut=recut,
            links=given.links,
            threads=given.threads,
            as_json=given.as_json,
        )
        return plan_stages(shared, staged)
    if useless := staged.given():
        raise UsageError(f"{useless[0]} is about stages; add --stages N")
    links = [_link(text) for text in given.links]
    _check_numbers(given)

    from worker.cli.plan_report import Report, print_report

    name, workload, step_source = _model(config, given)
    bases = _bases(config, run, given.settings)
    try:
        answers = tuple(_answer(link, workload, bases, config.preset, given) for link in links)
    except ValueError as error:
        where = config.source.of_named("diloco", str(error))
        raise ConfigError(f"{where}: [diloco] {error}") from error
    report = Report(
        name=name,
        workload=workload,
        step_source=step_source,
        peers=given.peers,
        target=given.target,
        preset=config.preset,
        bases=bases,
        answers=answers,
    )
    if given.as_json:
        click.echo(json.dumps(report.document(), indent=1))
    else:
        print_report(report)
    return 0


def _check_staged() -> None:
    """Raises UsageError for an option that says nothing about stages."""
    context = click.get_current_context()
    for name in ("peers", "preset", "target", "step_s", "params", "layers"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "step-time" if name == "step_s" else name
            raise UsageError(f"--{flag} does not go with --stages; leave it out")


def _answer(
    link: "Link", workload: "Workload", bases: "dict[str, Plan]", preset: str, given: _Given
) -> "Answer":
    """Raises ValueError where the run's own plan, `bases[preset]`, does not fit the model."""
    from algorithms.utilization import needed_mbps, predict, propose
    from worker.cli.plan_report import Answer

    own, place = bases[preset], (workload, link, given.peers)
    return Answer(
        link=link,
        prediction=predict(own, *place),
        needed_mbps={share: needed_mbps(own, *place, share) for share in _SPEED_TARGETS},
        proposals=propose(given.target, bases, *place),
    )


def _link(text: str) -> "Link":
    from algorithms.link import parse_link

    try:
        return parse_link(text)
    except ValueError as error:
        raise UsageError(f"--link: {error}") from error


def _check_numbers(given: _Given) -> None:
    """Raises UsageError where --params, --layers and --step-time do not go together, or are NaN."""
    for name, value in (("step-time", given.step_s), ("target", given.target)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"--{name} is {value}; it must be a finite number")
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


def _bases(config: "Config", run: Path | None, settings: Sequence[str]) -> "dict[str, Plan]":
    """By preset, the plan that typing `--preset` gives with this file and these settings.

    The run's own comes first: of equals it is proposed. Pairs end with replicas that differ, so
    they are proposed only to who has chosen them.
    """
    from algorithms.plan import PRESETS
    from worker.config import load_config

    bases = {config.preset: config.plan}
    for name in PRESETS:
        if name not in bases:
            try:
                plan = load_config(run, settings, name).plan
            except ConfigError:
                continue  # the run's own settings do not go with this preset
            if plan.exchange != "pairs" or config.plan.exchange == "pairs":
                bases[name] = plan
    return bases


def _model(config: "Config", given: _Given) -> "tuple[str, Workload, str]":
    """What it is called, its workload, and where the time of its step comes from.

    From --params and --layers, or else the run's own task, timed where no time is given.
    """
    from algorithms.utilization import Workload, workload_of

    if given.params is not None and given.layers is not None:
        assert given.step_s is not None
        small, larger = divmod(given.params, given.layers)
        sizes = tuple(small + (index < larger) for index in range(given.layers))
        workload = Workload(step_s=given.step_s, layers=sizes)
        return "this model", workload, "as given"
    from worker.config import task_of

    task = task_of(config)
    module = task.model()
    parameters = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
    if given.step_s is not None:
        step_s, source = given.step_s, "as given"
    else:
        step_s = _timed_step_s(config, task, module, given.threads)
        threads = "one thread" if given.threads == 1 else f"{given.threads} threads"
        source = f"measured on this machine, {threads}"
    return config.task.name, workload_of(parameters, step_s), source


def _timed_step_s(config: "Config", task: Any, module: Any, threads: int) -> float:
    """The median of some real inner steps, in seconds."""
    import torch

    from worker.tasks import Cursor
    from worker.training.replica import InnerReplica

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cursor = Cursor(seed=config.run.seed, stream="plan")
        replica = InnerReplica(task, module, config.inner, cursor, config.run.steps)
        times_s: list[float] = []
        for step in range(1, _UNTIMED_STEPS + _MOST_STEPS + 1):
            began_s = time.perf_counter()
            replica.inner_step(step, replica.backward(step))
            if step > _UNTIMED_STEPS:
                times_s.append(time.perf_counter() - began_s)
            if len(times_s) >= _FEWEST_STEPS and sum(times_s) >= _TIMED_S:
                break
    finally:
        torch.set_num_threads(before)
    return statistics.median(times_s)
