"""`murmur plan`: what a run's settings cost on a link, and which ones would reach a target."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from murmuration.worker.cli.options import check_finite, flag_of, link_of, options
from murmuration.worker.cli.plan_options import PlanOptions, StageOptions
from murmuration.worker.cli.timing import Repetitions, torch_threads
from murmuration.worker.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from murmuration.algorithms.link import Link
    from murmuration.algorithms.plan import Plan
    from murmuration.algorithms.workload import Workload
    from murmuration.worker.cli.plan_report import LinkAnswer
    from murmuration.worker.config import Config
    from murmuration.worker.pipeline.part import Part

_SPEED_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# What a run's file says of its own count of stages only, unsaid.
_NOT_OF_OTHER_COUNTS = ("stages.layers=[]", "stages.skip=0", "stages.spread=0")
_STEPS = Repetitions(untimed=3, fewest=5, most=100, enough_s=1.0)


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@options("given", PlanOptions)
@options("staged", StageOptions)
def plan(run: Path | None, given: PlanOptions, staged: StageOptions) -> int:
    """Predict how much of the time workers compute on a link, and propose settings.

    RUN is the run's TOML file. Without one the defaults are taken. Everything is simulated: no
    worker is started and nothing is sent.

    With --stages the model is cut into stages on several peers. The command then predicts the
    iteration time of each routing, and proposes which peer serves which stage.
    """
    from murmuration.worker.config import file_says, load_config

    recut = staged.recuts(file_says(run, "stages", "count"))
    unsaid = dict.fromkeys(_NOT_OF_OTHER_COUNTS, f"--stages {staged.stages}") if recut else {}
    settings = (*unsaid, *given.settings, *staged.said)
    config = load_config(run, settings, given.preset, {**unsaid, **staged.said})
    measured = any(text.endswith(".json") for text in given.links)
    if staged.stages is not None or measured or config.stages.count > 1:
        _check_staged()
        from murmuration.worker.cli.plan_stages import StagedRun, plan_stages

        return plan_stages(StagedRun(config=config, recut=recut, given=given, staged=staged))
    for each in fields(StageOptions):
        if getattr(staged, each.name) is not None:
            flag = flag_of(StageOptions, each.name)
            raise UsageError(f"{flag} is about stages; add --stages N")
    links = [link_of(text) for text in given.links]
    _check_numbers(given)

    from murmuration.worker.cli.plan_report import PlanReport, print_report

    name, workload, step_source = _model(config, given)
    bases = _bases(config, run, given.settings)
    try:
        answers = tuple(_answer(link, workload, bases, config.preset, given) for link in links)
    except ValueError as error:
        where = config.source.of_named("diloco", str(error))
        raise ConfigError(f"{where}: [diloco] {error}") from error
    report = PlanReport(
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
            flag = flag_of(PlanOptions, name)
            raise UsageError(f"{flag} does not go with --stages; leave it out")


def _answer(
    link: "Link", workload: "Workload", bases: "dict[str, Plan]", preset: str, given: PlanOptions
) -> "LinkAnswer":
    """Raises ValueError where the run's own plan, `bases[preset]`, does not fit the model."""
    from murmuration.algorithms.proposals import propose
    from murmuration.algorithms.utilization import needed_mbps, predict
    from murmuration.worker.cli.plan_report import LinkAnswer

    own, place = bases[preset], (workload, link, given.peers)
    return LinkAnswer(
        link=link,
        prediction=predict(own, *place),
        needed_mbps={share: needed_mbps(own, *place, share) for share in _SPEED_TARGETS},
        proposals=propose(given.target, bases, *place),
    )


def _check_numbers(given: PlanOptions) -> None:
    """Raises UsageError where --params, --layers and --step-time do not go together, or are NaN."""
    check_finite(given, "step_s", "target")
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
    they are proposed only to a run that has chosen them; likewise another inner optimizer.
    """
    from murmuration.algorithms.presets import PRESETS
    from murmuration.worker.config import load_config

    bases = {config.preset: config.plan}
    for name in PRESETS:
        if name not in bases:
            try:
                other = load_config(run, settings, name)
            except ConfigError:
                continue  # the run's own settings do not go with this preset
            paired = other.plan.exchange == "pairs" and config.plan.exchange != "pairs"
            if other.inner == config.inner and not paired:
                bases[name] = other.plan
    return bases


def _model(config: "Config", given: PlanOptions) -> "tuple[str, Workload, str]":
    """What it is called, its workload, and where the time of its step comes from.

    From --params and --layers, or else the run's own task, timed where no time is given. With
    `kseed` it is the vector of coefficients that travels.
    """
    from murmuration.algorithms.workload import Workload, workload_of
    from murmuration.worker.training.config import KSEED

    if given.params is not None and given.layers is not None:
        assert given.step_s is not None
        if config.inner.optimizer == KSEED:
            vector = (config.inner.seeds,)
            workload = Workload(step_s=given.step_s, layers=vector, ddp_parameters=given.params)
            return "this model", workload, "as given"
        small, larger = divmod(given.params, given.layers)
        sizes = tuple(small + (index < larger) for index in range(given.layers))
        workload = Workload(step_s=given.step_s, layers=sizes)
        return "this model", workload, "as given"
    from murmuration.worker.config import task_of
    from murmuration.worker.pipeline.part import part_of
    from murmuration.worker.training.kseed import seed_space_of

    task = task_of(config)
    part = part_of(task, config)
    module = part.module
    parameters = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
    step_s, source = given.step_s, "as given"
    if step_s is None:
        step_s, source = _timed_step_s(config, task, part, given.threads), given.time_source
    workload = workload_of(parameters, step_s)
    if (space := seed_space_of(module)) is not None:
        workload = replace(workload, ddp_parameters=space.elements)
    return config.task.name, workload, source


def _timed_step_s(config: "Config", task: Any, part: "Part", threads: int) -> float:
    """The median of some real inner steps, in seconds."""
    from murmuration.worker.tasks import Cursor
    from murmuration.worker.training.inbox import Mailbox

    cursor = Cursor(seed=config.run.seed, stream="plan")
    replica = part.replica(task, config, cursor, Mailbox())
    numbers = itertools.count(1)

    def step() -> tuple[float]:
        began_s, number = time.perf_counter(), next(numbers)
        replica.inner_step(number, replica.backward(number))
        return (time.perf_counter() - began_s,)

    with torch_threads(threads):
        (step_s,) = _STEPS.medians(step)
    return step_s
