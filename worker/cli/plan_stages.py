"""`murmur plan --stages`: what an iteration of a staged swarm takes with each routing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from worker.cli.plan_stages_options import Shared, StageOptions
from worker.errors import UsageError

if TYPE_CHECKING:
    from algorithms.skippipe.pipeline import Pipeline
    from algorithms.skippipe.placement import Groups
    from algorithms.skippipe.prediction import Prediction
    from worker.cli.plan_stages_case import Case
    from worker.cli.plan_stages_report import Report, Row

_RANDOM_DRAWS = 20


def plan_stages(shared: Shared, options: StageOptions) -> int:
    """Predicts, places, prints and draws.

    Raises:
        UsageError: an option or a file of measurements, with the fix.
        ConfigError, TaskError: the run's file and task, where they are read.
    """
    from worker.cli.plan_stages_case import case_of
    from worker.cli.plan_stages_report import Report, print_report

    case = case_of(shared, options)
    proposed = _proposed(case)
    stages = case.known.stages or proposed
    anew = None if proposed == stages else _rows(case, case.swarm.pipeline(proposed))
    report = Report(
        case=case,
        pipeline=case.swarm.pipeline(stages),
        rows=_rows(case, case.swarm.pipeline(stages)),
        proposed=proposed,
        proposed_rows=anew,
    )
    if shared.as_json:
        click.echo(json.dumps(report.document(), indent=1))
    else:
        print_report(report)
    if options.plot_file is not None:
        _draw(options.plot_file, report)
    return 0


def _proposed(case: "Case") -> "Groups":
    from algorithms.skippipe.proposal import propose_placement

    return propose_placement(
        case.swarm,
        case.sizes,
        case.rules,
        case.microbatches,
        seed=case.seed,
        shared_uplinks=case.shared_uplinks,
    )


def _rows(case: "Case", pipeline: "Pipeline") -> "dict[str, Row]":
    """By routing; of random routes several draws, as one says little."""
    from algorithms.skippipe.prediction import origins_in_turns, predict
    from algorithms.skippipe.routing import PRESETS
    from worker.cli.plan_stages_report import Row

    origins = origins_in_turns(pipeline, case.microbatches)

    def predicted(routing: str, seed: int) -> "Prediction":
        return predict(
            pipeline,
            case.rules,
            origins,
            routing,
            seed,
            shared_uplinks=case.shared_uplinks,
            effort_s=case.effort_s,
        )

    rows = {}
    for routing in PRESETS:
        draws = _RANDOM_DRAWS if routing == "random" else 1
        rows[routing] = Row(tuple(predicted(routing, case.seed + draw) for draw in range(draws)))
    return rows


def _draw(path: Path, report: "Report") -> None:
    from worker.cli.plan_stages_picture import draw

    try:
        draw(path, report)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror or error}") from error
