"""From the command line of `murmur plan --stages` to the swarm that it describes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from algorithms.codecs import codec_by_name
from algorithms.link import Link, parse_link
from algorithms.skippipe.cost import LOSS_RATIO, Floats
from algorithms.skippipe.placement import stage_sizes
from algorithms.skippipe.proposal import Swarm
from algorithms.skippipe.route import Rules, visited_stages
from algorithms.skippipe.search import EFFORT_S
from worker.cli.plan_stages_links import (
    RECOMPUTED_RATIO,
    Known,
    Visits,
    given_links,
    read_links,
)
from worker.cli.plan_stages_options import Shared, StageOptions, is_file
from worker.errors import UsageError
from worker.pipeline.config import StagesConfig

if TYPE_CHECKING:
    from worker.cli.plan_stages_cut import Cuts
    from worker.cli.plan_stages_timing import StagedModel
    from worker.config import Config

T = TypeVar("T")

REPLICAS, SKIP, MEMORY = 2, 0.25, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What is to be predicted.

    Args:
        known: of the peers.
        sizes: replicas of each stage.
        rules: of routes that skip.
        microbatches: of each origin.
        swarm: the peers with their costs.
        cuts: the run's own cut, and one that is better; None where layers are not timed.
        source: where the times of visits come from.
        shared_uplinks, effort_s, seed: as `predict` takes them.
    """

    known: Known
    sizes: tuple[int, ...]
    rules: Rules
    microbatches: int
    swarm: Swarm
    cuts: "Cuts | None"
    source: str
    shared_uplinks: bool
    effort_s: float
    seed: int


def case_of(shared: Shared, options: StageOptions) -> Case:
    """Raises UsageError, ConfigError or TaskError, with the fix."""
    for flag, value in (
        ("skip", options.skip),
        ("forward-ms", options.forward_ms),
        ("effort", options.effort_s),
        ("stage-mib", options.stage_mib),
    ):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"--{flag} is {value}; it must be a finite number")
    measured = [text for text in shared.links if is_file(text)]
    if measured and len(shared.links) > 1:
        raise UsageError(f"--links {measured[0]} has all links; leave the other --links out")
    config, run = shared.config, shared.config.stages
    count = run.count if options.stages is None and run.count > 1 else options.stages
    known = read_links(Path(measured[0])) if measured else _given(shared.links, count, options)
    stages = _stages(known, count, options)
    skip = _first(options.skip, known.skip, _usual_skip(shared, options))
    visited = visited_stages(stages, skip)
    unskipped = 0 if visited == stages else None  # whatever the others say of routes that skip
    spread = _first(options.spread, unskipped, known.spread, run.spread)
    try:
        rules = Rules(stages=stages, visited=visited, spread=spread)
    except ValueError as error:
        unequal = f" --spread {spread}" if spread else ""
        raise UsageError(f"--skip {skip:g}{unequal}: {error}") from error
    microbatches = _first(options.microbatches, known.microbatches, run.microbatches)
    model = _model(known, stages, shared, options)
    visits, source = _visits(known, model, shared, options)
    memory = _memory(known, options)
    rows = (len(known.names), stages)
    swarm = Swarm(
        links=known.links,
        message_bytes=_message_bytes(known, model, options),
        exchange_s=_exchange_s(known, model, config, math.ceil(microbatches / min(memory))),
        memory=memory,
        forward_s=np.broadcast_to(visits.forward_s, rows),
        backward_s=np.broadcast_to(visits.backward_s, rows),
        loss_s=np.broadcast_to(visits.loss_s, rows)[:, 0],
    )
    return Case(
        known=known,
        sizes=_sizes(known, rules, options),
        rules=rules,
        microbatches=microbatches,
        swarm=swarm,
        cuts=_cuts(model, max(memory), config, options),
        source=source,
        shared_uplinks=_first(options.shared_uplinks, True),
        effort_s=_first(options.effort_s, EFFORT_S),
        seed=_first(options.seed, 0),
    )


def _given(links: Sequence[str], stages: int | None, options: StageOptions) -> Known:
    """One link for all peers, or one for each."""
    each = [_link(part) for text in links for part in text.split(";")]
    if len(each) == 1:
        each *= (stages or 1) * (options.replicas or REPLICAS)
    return given_links(each)


def _link(text: str) -> Link:
    try:
        link = parse_link(text)
    except ValueError as error:
        raise UsageError(f"--link: {error}") from error
    if link.jitter_s or link.loss:
        raise UsageError(f"--link {text}: stages are predicted without jitter and loss; drop them")
    return link


def _stages(known: Known, stages: int | None, options: StageOptions) -> int:
    """How many there are. Args: stages: as the command line or else the run says."""
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
    if stages is None:
        raise UsageError("--links: the file does not say who serves which stage; add --stages N")
    if peers < stages:
        raise UsageError(f"--stages {stages}: {peers} peers cannot serve them; add links")
    if options.replicas is not None and stages * options.replicas != peers:
        raise UsageError(
            f"--replicas {options.replicas} of {stages} stages are {stages * options.replicas} "
            f"peers, but there are links of {peers}; leave --replicas out"
        )
    return stages


def _sizes(known: Known, rules: Rules, options: StageOptions) -> tuple[int, ...]:
    """Replicas of each stage; shared out by how often it is visited where nobody says it."""
    if known.stages is not None:
        return tuple(map(len, known.stages))
    peers = len(known.names)
    if options.replicas is not None or peers % rules.stages == 0:
        return (peers // rules.stages,) * rules.stages
    share = (rules.visited - 1) / max(1, rules.stages - 1)
    return stage_sizes(peers, [1.0, *[share] * (rules.stages - 1)])


def _memory(known: Known, options: StageOptions) -> tuple[int, ...]:
    if options.memory is None and known.memory is not None:
        return known.memory
    return (_first(options.memory, MEMORY),) * len(known.names)


def _usual_skip(shared: Shared, options: StageOptions) -> float:
    """Where neither an option nor a file of measurements says it."""
    run = shared.config.stages
    if shared.recut:
        return run.skip or SKIP
    if options.stages is not None:  # what --stages says is nothing of skips
        run = replace(run, count=1, layers=())
    return SKIP if run == StagesConfig() else run.skip


def _model(
    known: Known, stages: int, shared: Shared, options: StageOptions
) -> "StagedModel | None":
    """The run's model; None where the bytes and the times of visits are known without it."""
    said_bytes = _first_or_none(options.activation_bytes, known.activation_bytes)
    timed = options.forward_ms is None and known.visits is None
    if is_file(shared.links[0]):
        if said_bytes is None:
            raise UsageError("--links: the file has no activation_bytes; add --activation-bytes")
        if timed:
            raise UsageError(
                "--links: the file has forward_s of no peer; let the swarm run for an iteration, "
                "or add --forward-ms"
            )
    if said_bytes is None or timed:
        from worker.cli.plan_stages_timing import staged_model

        codec = _first(options.activations, shared.config.stages.activations)
        return staged_model(shared.config, stages, codec, timed=timed, threads=shared.threads)
    for name in ("model", "activations"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} is not used: the bytes and the compute time of a visit are given; "
                "leave it out"
            )
    return None


def _message_bytes(known: Known, model: "StagedModel | None", options: StageOptions) -> int:
    of_model = None if model is None else model.activation_bytes
    return _first(options.activation_bytes, known.activation_bytes, of_model)


def _exchange_s(known: Known, model: "StagedModel | None", config: "Config", waves: int) -> Floats:
    """Of a stage's parameters, as a share of a wave: once in H iterations of so many waves."""
    if model is None or config.plan.exchange == "none":
        return np.zeros_like(known.links.latency_s)
    size = codec_by_name(config.plan.codec).encoded_bytes(model.stage_parameters)
    return known.links.edge_s(size) / (config.plan.inner_steps * waves)


def _visits(
    known: Known, model: "StagedModel | None", shared: Shared, options: StageOptions
) -> tuple[Visits, str]:
    """(times that broadcast to peers times stages, where they come from)."""
    if options.forward_ms is not None:
        forward_s = np.array(options.forward_ms / 1e3)
        ratios = RECOMPUTED_RATIO * forward_s, LOSS_RATIO * forward_s
        return Visits(forward_s=forward_s, backward_s=ratios[0], loss_s=ratios[1]), "as given"
    if known.visits is not None:
        # What a peer took on its own stage; stages are cut to take about the same.
        own = known.visits
        return Visits(
            forward_s=own.forward_s[:, None],
            backward_s=own.backward_s[:, None],
            loss_s=own.loss_s[:, None],
        ), "as measured by the swarm"
    assert model is not None
    from worker.cli.plan_stages_cut import visits_of

    threads = "one thread" if shared.threads == 1 else f"{shared.threads} threads"
    return visits_of(model), f"measured on this machine, {threads}"


def _cuts(
    model: "StagedModel | None", held: int, config: "Config", options: StageOptions
) -> "Cuts | None":
    """Args: held: microbatches in flight on a peer."""
    if model is None or not model.sweeps:
        if options.stage_mib is not None:
            raise UsageError(
                "--stage-mib bounds a cut by layers that are timed here; leave it out, or "
                "--forward-ms and files of measurements"
            )
        return None
    from worker.cli.plan_stages_cut import cuts_of

    return cuts_of(
        model,
        held=held,
        # The anchor, and with rounds the outer momentum.
        committed=1 if config.plan.exchange == "none" else 2,
        limit_bytes=None if options.stage_mib is None else int(options.stage_mib * 2**20),
    )


def _first(*values: T | None) -> T:
    """The first that is given; the last always is."""
    value = _first_or_none(*values)
    assert value is not None
    return value


def _first_or_none(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)
