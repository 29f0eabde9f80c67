"""`murmur plan --stages`: the swarm that is described, and an iteration of it with each routing."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import click
import numpy as np

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.link import Link
from murmuration.algorithms.skippipe.assignment import (
    StageCandidates,
    propose_placement,
    stage_sizes,
)
from murmuration.algorithms.skippipe.pipeline import LOSS_RATIO, Floats, Links, Pipeline
from murmuration.algorithms.skippipe.route import Rules, visited_stages
from murmuration.algorithms.skippipe.routing import ROUTINGS, origins_in_turns, predict
from murmuration.algorithms.skippipe.search import EFFORT_S
from murmuration.worker.cli.options import check_finite, link_of
from murmuration.worker.cli.plan_measurements import (
    RECOMPUTED_RATIO,
    Measurements,
    VisitTimes,
    read_links,
)
from murmuration.worker.cli.plan_options import PlanOptions, StageOptions
from murmuration.worker.cli.plan_stages_cut import StageCuts, StagedModel, cuts_of, staged_model
from murmuration.worker.cli.plan_stages_report import (
    RoutingRow,
    StageCase,
    StagesReport,
    print_report,
)
from murmuration.worker.errors import UsageError
from murmuration.worker.pipeline.config import StagesConfig

if TYPE_CHECKING:
    from murmuration.worker.config import Config

T = TypeVar("T")

_REPLICAS, _SKIP, _MEMORY = 2, 0.25, 3
_RANDOM_DRAWS = 20


@dataclass(frozen=True, kw_only=True)
class StagedRun:
    """What is asked: the run, and the command line.

    Args:
        recut: whether `--stages` is another count than that of the run's file.
    """

    config: "Config"
    recut: bool
    given: PlanOptions
    staged: StageOptions

    @property
    def count(self) -> int | None:
        """Of stages, as the command line or else the run says."""
        count = self.config.stages.count
        return count if self.staged.stages is None and count > 1 else self.staged.stages

    @property
    def skip(self) -> float:
        """Where neither an option nor a file of measurements says it."""
        run = self.config.stages
        if self.recut:
            return run.skip or _SKIP
        if self.staged.stages is not None:  # what --stages says is nothing of skips
            run = replace(run, count=1, layers=())
        return _SKIP if run == StagesConfig() else run.skip


def plan_stages(run: StagedRun) -> int:
    """Predicts, places and prints. Raises as `report_of`."""
    report = report_of(run)
    if run.given.as_json:
        click.echo(json.dumps(report.document(), indent=1))
    else:
        print_report(report)
    return 0


def report_of(run: StagedRun) -> StagesReport:
    """Predicts an iteration with each routing, on the proposed placement and on the measured one.

    Raises:
        UsageError: an option or a file of measurements, with the fix.
        ConfigError, TaskError: the run's file and task, where they are read.
    """
    case = case_of(run)
    proposed = propose_placement(
        case.swarm, case.sizes, case.rules, case.microbatches, seed=case.seed, shared_uplinks=True
    )
    stages = case.known.stages or proposed
    better = None if proposed == stages else _rows(case, case.swarm.pipeline(proposed))
    pipeline = case.swarm.pipeline(stages)
    return StagesReport(
        case=case,
        pipeline=pipeline,
        rows=_rows(case, pipeline),
        proposed=proposed,
        proposed_rows=better,
    )


def _rows(case: StageCase, pipeline: Pipeline) -> dict[str, RoutingRow]:
    """By routing; of random routes several draws, as one says little."""
    origins = origins_in_turns(pipeline, case.microbatches)
    rows = {}
    for routing in ROUTINGS:
        draws = tuple(
            predict(
                pipeline,
                case.rules,
                origins,
                routing,
                case.seed + draw,
                shared_uplinks=True,
                effort_s=EFFORT_S,
            )
            for draw in range(_RANDOM_DRAWS if routing == "random" else 1)
        )
        rows[routing] = RoutingRow(draws)
    return rows


def case_of(run: StagedRun) -> StageCase:
    """Raises UsageError, ConfigError or TaskError, with the fix."""
    options, settings = run.staged, run.config.stages
    check_finite(options, "skip", "forward_ms", "stage_mib")
    file = run.given.measurements
    known = _given(run) if file is None else read_links(file)
    stages = _stages(known, run.count, options)
    skip = _first(options.skip, known.skip, run.skip)
    visited = visited_stages(stages, skip)
    unskipped = 0 if visited == stages else None  # whatever the others say of routes that skip
    spread = _first(options.spread, unskipped, known.spread, settings.spread)
    try:
        rules = Rules(stages=stages, visited=visited, spread=spread)
    except ValueError as error:
        unequal = f" --spread {spread}" if spread else ""
        raise UsageError(f"--skip {skip:g}{unequal}: {error}") from error
    microbatches = _first(options.microbatches, known.microbatches, settings.microbatches)
    model = _model(known, stages, run)
    visits, source = _visits(known, model, run)
    memory = known.memory
    if options.memory is not None or memory is None:
        memory = (_first(options.memory, _MEMORY),) * len(known.names)
    of_model = None if model is None else model.activation_bytes
    rows = (len(known.names), stages)
    swarm = StageCandidates(
        links=known.links,
        message_bytes=_first(options.activation_bytes, known.activation_bytes, of_model),
        exchange_s=_exchange_s(known, model, run.config),
        memory=memory,
        forward_s=np.broadcast_to(visits.forward_s, rows),
        backward_s=np.broadcast_to(visits.backward_s, rows),
        loss_s=np.broadcast_to(visits.loss_s, rows)[:, 0],
    )
    return StageCase(
        known=known,
        sizes=_sizes(known, rules, options),
        rules=rules,
        microbatches=microbatches,
        swarm=swarm,
        cuts=_cuts(model, max(memory), run),
        source=source,
        seed=_first(options.seed, 0),
    )


def _given(run: StagedRun) -> Measurements:
    """Of peers w0, w1, ...: one link for all, or one for each."""
    links = [_link(part) for text in run.given.links for part in text.split(";")]
    if len(links) == 1:
        links *= (run.count or 1) * (run.staged.replicas or _REPLICAS)
    names = tuple(f"w{index}" for index in range(len(links)))
    return Measurements(names=names, links=Links.of_lines(links), given=tuple(links))


def _link(text: str) -> Link:
    link = link_of(text)
    if link.jitter_s or link.loss:
        raise UsageError(f"--link {text}: stages are predicted without jitter and loss; drop them")
    return link


def _stages(known: Measurements, count: int | None, options: StageOptions) -> int:
    """How many there are. Args: count: as the command line or else the run says."""
    peers = len(known.names)
    if known.stages is not None:
        if options.stages not in (None, len(known.stages)):
            raise UsageError(
                f"--stages {options.stages}: the file has {len(known.stages)} stages; "
                "leave --stages out"
            )
        if options.replicas is not None:
            raise UsageError("--replicas: the file says who serves which stage; leave it out")
        return len(known.stages)
    if count is None:
        raise UsageError("--links: the file does not say who serves which stage; add --stages N")
    if peers < count:
        raise UsageError(f"--stages {count}: {peers} peers cannot serve them; add links")
    if options.replicas is not None and count * options.replicas != peers:
        raise UsageError(
            f"--replicas {options.replicas} of {count} stages are {count * options.replicas} "
            f"peers, but there are links of {peers}; leave --replicas out"
        )
    return count


def _sizes(known: Measurements, rules: Rules, options: StageOptions) -> tuple[int, ...]:
    """Replicas of each stage: as the file or an option says, else by how often it is visited."""
    if known.stages is not None:
        return tuple(map(len, known.stages))
    peers = len(known.names)
    if options.replicas is not None or peers % rules.stages == 0:
        return (peers // rules.stages,) * rules.stages
    share = (rules.visited - 1) / max(1, rules.stages - 1)
    return stage_sizes(peers, [1.0, *[share] * (rules.stages - 1)])


def _model(known: Measurements, stages: int, run: StagedRun) -> StagedModel | None:
    """The run's model; None where the bytes and the times of visits are known without it."""
    options = run.staged
    sized = options.activation_bytes is not None or known.activation_bytes is not None
    timed = options.forward_ms is None and known.visits is None
    if run.given.measurements is not None:
        if not sized:
            raise UsageError("--links: the file has no activation_bytes; add --activation-bytes")
        if timed:
            raise UsageError(
                "--links: the file has forward_s of no peer; let the swarm run for an iteration, "
                "or add --forward-ms"
            )
    if not sized or timed:
        codec = _first(options.activations, run.config.stages.activations)
        return staged_model(run.config, stages, codec, timed=timed, threads=run.given.threads)
    for name in ("model", "activations"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} is not used: the bytes and the compute time of a visit are given; "
                "leave it out"
            )
    return None


def _exchange_s(known: Measurements, model: StagedModel | None, config: "Config") -> Floats:
    """Of a stage's parameters, spread over the H iterations from one exchange to the next."""
    if model is None or config.plan.exchange == "none":
        return np.zeros_like(known.links.latency_s)
    size = codec_by_name(config.plan.codec).encoded_bytes(model.stage_parameters)
    return known.links.edge_s(size) / config.plan.inner_steps


def _visits(
    known: Measurements, model: StagedModel | None, run: StagedRun
) -> tuple[VisitTimes, str]:
    """(times that broadcast to peers times stages, where they come from)."""
    if run.staged.forward_ms is not None:
        forward_s = np.array(run.staged.forward_ms / 1e3)
        times = VisitTimes(forward_s, RECOMPUTED_RATIO * forward_s, LOSS_RATIO * forward_s)
        return times, "as given"
    if known.visits is not None:
        # What a peer took on its own stage; stages are cut to take about the same.
        return VisitTimes(*(each[:, None] for each in known.visits)), "as measured by the swarm"
    assert model is not None
    return model.visits(), run.given.time_source


def _cuts(model: StagedModel | None, held: int, run: StagedRun) -> StageCuts | None:
    """Args: held: microbatches in flight on a peer."""
    limit_mib = run.staged.stage_mib
    if model is None or not model.sweeps:
        if limit_mib is not None:
            raise UsageError(
                "--stage-mib bounds a cut by layers that are timed here; leave it out, or "
                "--forward-ms and files of measurements"
            )
        return None
    # The anchor, and with rounds the outer momentum.
    committed = 1 if run.config.plan.exchange == "none" else 2
    limit_bytes = None if limit_mib is None else int(limit_mib * 2**20)
    return cuts_of(model, held=held, committed=committed, limit_bytes=limit_bytes)


def _first(*values: T | None) -> T:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)
