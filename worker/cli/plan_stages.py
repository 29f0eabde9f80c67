"""`murmur plan --stages`: an iteration by each routing, who serves which stage with what."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import numpy as np

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.link import Link
from murmuration.algorithms.skippipe.assignment import (
    Groups,
    StageCandidates,
    propose_placement,
    stage_sizes,
)
from murmuration.algorithms.skippipe.pipeline import (
    BACKWARD_RATIO,
    LOSS_RATIO,
    Floats,
    Links,
    Pipeline,
)
from murmuration.algorithms.skippipe.route import Rules, visited_stages
from murmuration.algorithms.skippipe.routing import (
    ROUTINGS,
    RoutingPrediction,
    origins_in_turns,
    predict,
)
from murmuration.algorithms.skippipe.search import EFFORT_S
from murmuration.protos.figures import count, percent, seconds, size
from murmuration.worker.cli.options import check_finite, link_of
from murmuration.worker.cli.plan_model import StageCuts, StagedModel, staged_model
from murmuration.worker.errors import UsageError
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.views.summary import text_table

if TYPE_CHECKING:
    from murmuration.worker.cli.plan_command import PlanOptions, StageOptions
    from murmuration.worker.config import Config

T = TypeVar("T")

_REPLICAS, _SKIP, _MEMORY = 2, 0.25, 3
_RANDOM_DRAWS = 20
_RECOMPUTED_RATIO = 1 + BACKWARD_RATIO  # a backward computes its stage's forward again


# ------------------------------------------------------------------------- the file of measurements


class VisitTimes(NamedTuple):
    """Seconds of visits; they broadcast to peers times stages."""

    forward_s: Floats
    backward_s: Floats
    loss_s: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurements:
    """What is known of P peers; None where the command line has to say it.

    Args:
        names, links: of the peers.
        given: the link of each peer, where that is what is known.
        stages: the peers of each stage, where they are placed already.
        visits: of each peer on the stage that it serves, shape (P,).
        memory: microbatches that each peer may hold.
        activation_bytes, microbatches, skip, spread: as in the file.
        filled: what was not measured and is replaced by the median of the rest, in words.
    """

    names: tuple[str, ...]
    links: Links
    given: tuple[Link, ...] = ()
    stages: Groups | None = None
    visits: VisitTimes | None = None
    memory: tuple[int, ...] | None = None
    activation_bytes: int | None = None
    microbatches: int | None = None
    skip: float | None = None
    spread: int | None = None
    filled: tuple[str, ...] = ()


def read_links(path: Path) -> Measurements:
    """Reads what a staged worker writes. Raises UsageError: what is wrong in which entry."""
    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise ValueError('not an object; it begins like {"peers": ["w0", "w1"], ...}')
        return _Document(document).known()
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise UsageError(f"--links {path}: {reason}") from error
    except ValueError as error:
        raise UsageError(f"--links {path}: {error}") from error


class _Document:
    """The entries, checked one after another. All raise ValueError."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries, self._gaps = entries, list[str]()
        names = entries.get("peers")
        texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not (names and texts and len(set(names)) == len(names)):
            raise ValueError('peers must be names, each once, like ["w0", "w1"]')
        self._names: tuple[str, ...] = tuple(names)

    def known(self) -> Measurements:
        stages, peers = self._stages(), len(self._names)
        links = Links(
            latency_s=self._matrix("latency_s", "latencies", zero=True),
            rate_bytes_per_s=self._matrix("rate_bytes_per_s", "rates"),
        )
        visits = self._visits(range(peers) if stages is None else stages[0])
        memory = self._numbers("memory", "memories", (peers,))
        return Measurements(
            names=self._names,
            links=links,
            stages=stages,
            visits=visits,
            memory=None if memory is None else tuple(max(1, int(held)) for held in memory),
            activation_bytes=self._number("activation_bytes", int, 1),
            microbatches=self._number("microbatches", int, 1),
            skip=self._number("skip", float, 0),
            spread=self._number("spread", int, 0),
            filled=tuple(self._gaps),
        )

    def _matrix(self, name: str, what: str, zero: bool = False) -> Floats:
        peers = len(self._names)
        values = self._numbers(name, what, (peers, peers), ~np.eye(peers, dtype=bool), zero)
        if values is None:
            raise ValueError(
                f"{name}: nothing is measured between any two peers; let the swarm run for an "
                "iteration, or give a --link for each peer instead"
            )
        return values

    def _visits(self, origins: Sequence[int]) -> VisitTimes | None:
        """None if no peer has measured a forward. Only stage 0 computes losses: that the others
        measured none is no gap."""
        shape = (len(self._names),)
        computes_loss = np.isin(np.arange(len(self._names)), origins)
        forward_s = self._numbers("forward_s", "forward times", shape)
        if forward_s is None:
            return None
        backward_s = self._numbers("backward_s", "backward times", shape)
        loss_s = self._numbers("loss_s", "loss times", shape, computes_loss)
        return VisitTimes(
            forward_s,
            _RECOMPUTED_RATIO * forward_s if backward_s is None else backward_s,
            LOSS_RATIO * forward_s if loss_s is None else loss_s,
        )

    def _numbers(
        self, name: str, what: str, shape: tuple[int, ...], read: Any = True, zero: bool = False
    ) -> Floats | None:
        """An array in which the median stands for what is null; None if all of it is.

        Args:
            what: the word for a gap; one among the values that are not `read` is none.
            zero: whether values may be 0.
        """
        peers, read = len(self._names), np.broadcast_to(read, shape)
        try:
            values = np.array(self._entries.get(name, [None] * peers), dtype=np.float64)
        except (TypeError, ValueError):  # not numbers, or rows of unequal length
            values = np.empty(0)
        if values.shape == (peers,) and np.isnan(values).all():
            return None
        missing = np.isnan(values)
        numbers = missing | np.isfinite(values) & (values >= 0 if zero else values > 0)
        if values.shape != shape or not numbers[read].all():
            raise ValueError(
                f"{name} must be {' rows of '.join(map(str, shape))} numbers "
                f"{'of at least' if zero else 'above'} 0, with null for what is not measured"
            )
        if read.any() and missing[read].all():
            return None
        if gaps := int(missing[read].sum()):
            self._gaps.append(f"{gaps} of {read.sum()} {what}")
        known = values[~missing & read].tolist()
        values[missing | ~read & ~numbers] = statistics.median(known) if known else 1.0
        return values

    def _stages(self) -> Groups | None:
        served = self._entries.get("stage")
        if served is None:
            return None
        whole = isinstance(served, list) and all(type(stage) is int for stage in served)
        if not whole or len(served) != len(self._names) or {*served} != {*range(max(served) + 1)}:
            raise ValueError(
                "stage must be a number for each peer, and each stage from 0 on needs a peer; "
                "leave it out to have the peers placed"
            )
        peers = range(len(served))
        return tuple(
            tuple(peer for peer in peers if served[peer] == stage)
            for stage in range(max(served) + 1)
        )

    def _number(self, name: str, kind: type[T], least: float) -> T | None:
        value = self._entries.get(name)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if value is not None and not (fits and value >= least):
            raise ValueError(f"{name} is {value!r}; it must be {kind.__name__}, at least {least}")
        return value


# -------------------------------------------------------------------------------- what is predicted


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCase:
    """What is to be predicted.

    Args:
        known: of the peers.
        sizes: replicas of each stage.
        rules: of routes that skip.
        microbatches: of each origin.
        swarm: the peers with their costs.
        cuts: the run's own cut, and one that is better; None where layers are not timed.
        source: where the times of visits come from.
    """

    known: Measurements
    sizes: tuple[int, ...]
    rules: Rules
    microbatches: int
    swarm: StageCandidates
    cuts: StageCuts | None
    source: str

    def proposed(self) -> Groups:
        """The peers of each stage, searched."""
        where = (self.swarm, self.sizes, self.rules, self.microbatches)
        return propose_placement(*where, shared_uplinks=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesAnswer:
    """An iteration with each routing on one placement.

    Args:
        pipeline: the peers on their stages.
        draws: by routing, predictions with seeds in a row: of random routes one says little.
    """

    pipeline: Pipeline
    draws: dict[str, tuple[RoutingPrediction, ...]]

    @classmethod
    def of(cls, case: StageCase, stages: Groups) -> "StagesAnswer":
        pipeline = case.swarm.pipeline(stages)
        origins = origins_in_turns(pipeline, case.microbatches)
        ask = partial(predict, pipeline, case.rules, origins, shared_uplinks=True)
        draws = {
            routing: tuple(
                ask(routing, seed, effort_s=EFFORT_S)
                for seed in range(_RANDOM_DRAWS if routing == "random" else 1)
            )
            for routing in ROUTINGS
        }
        return cls(pipeline=pipeline, draws=draws)

    def iteration_s(self, routing: str) -> float:
        return statistics.fmean(draw.iteration_s for draw in self.draws[routing])

    def of_full(self, routing: str) -> float:
        """Iteration time over that of `full`."""
        return self.iteration_s(routing) / self.iteration_s("full")

    def utilization(self, routing: str) -> list[float]:
        """Of each peer, mean over the draws."""
        of_draws = (draw.utilization for draw in self.draws[routing])
        return [statistics.fmean(shares) for shares in zip(*of_draws, strict=True)]

    def most_held(self, routing: str) -> int:
        """Microbatches that a peer held at once, in any draw."""
        return max(max(draw.timeline.peak) for draw in self.draws[routing])


def plan_stages(config: "Config", given: "PlanOptions", staged: "StageOptions") -> int:
    """Predicts on the measured placement or else the proposed one, and prints.

    Raises:
        UsageError: an option or a file of measurements, with the fix.
        ConfigError, TaskError: the run's file and task, where they are read.
    """
    case = case_of(config, given, staged)
    proposed = case.proposed()
    answer, better = StagesAnswer.of(case, case.known.stages or proposed), None
    if case.known.stages not in (None, proposed):
        better = StagesAnswer.of(case, proposed)
        if better.iteration_s("skip") >= answer.iteration_s("skip"):
            better = None
    if given.as_json:
        click.echo(json.dumps(document_of(case, answer, better), indent=1))
    else:
        for block in blocks_of(case, answer, better):
            click.echo(block)
    return 0


def case_of(config: "Config", given: "PlanOptions", staged: "StageOptions") -> StageCase:
    """Raises UsageError, ConfigError or TaskError, with the fix."""
    settings = config.stages
    check_finite(staged, "skip", "forward_ms")
    asked = settings.count if staged.stages is None and settings.count > 1 else staged.stages
    file = given.measurements
    known = _of_lines(asked, given, staged) if file is None else read_links(file)
    stages = _stages(known, asked, staged)
    rules = _rules(known, stages, settings, staged)
    model = _model(known, stages, config, given, staged)
    visits, source = _visits(known, model, given, staged)
    memory = known.memory
    if staged.memory is not None or memory is None:
        memory = (_first(staged.memory, _MEMORY),) * len(known.names)
    of_model = None if model is None else model.activation_bytes
    exchange_s = np.zeros_like(known.links.latency_s)
    if model is not None and config.plan.exchange != "none":
        encoded_bytes = codec_by_name(config.plan.codec).encoded_bytes(model.stage_parameters)
        exchange_s = known.links.edge_s(encoded_bytes) / config.plan.inner_steps
    rows = (len(known.names), stages)
    return StageCase(
        known=known,
        sizes=_sizes(known, rules, staged),
        rules=rules,
        microbatches=_first(staged.microbatches, known.microbatches, settings.microbatches),
        swarm=StageCandidates(
            links=known.links,
            message_bytes=_first(staged.activation_bytes, known.activation_bytes, of_model),
            exchange_s=exchange_s,
            memory=memory,
            forward_s=np.broadcast_to(visits.forward_s, rows),
            backward_s=np.broadcast_to(visits.backward_s, rows),
            loss_s=np.broadcast_to(visits.loss_s, rows)[:, 0],
        ),
        cuts=None if model is None else model.cuts,
        source=source,
    )


def _of_lines(stages: int | None, given: "PlanOptions", staged: "StageOptions") -> Measurements:
    """Peers w0, w1, ...: one link for all, or one for each."""
    links = [link_of(part) for text in given.links for part in text.split(";")]
    if any(link.jitter_s or link.loss for link in links):
        raise UsageError("--link: stages are predicted without jitter and loss; drop them")
    if len(links) == 1:
        links *= (stages or 1) * (staged.replicas or _REPLICAS)
    names = tuple(f"w{index}" for index in range(len(links)))
    return Measurements(names=names, links=Links.of_lines(links), given=tuple(links))


def _stages(known: Measurements, asked: int | None, staged: "StageOptions") -> int:
    """How many there are. Args: asked: by the command line or else the run."""
    peers, replicas = len(known.names), staged.replicas
    if known.stages is not None:
        if staged.stages not in (None, len(known.stages)):
            raise UsageError(
                f"--stages {staged.stages}: the file has {len(known.stages)} stages; "
                "leave --stages out"
            )
        if replicas is not None:
            raise UsageError("--replicas: the file says who serves which stage; leave it out")
        return len(known.stages)
    if asked is None:
        raise UsageError("--links: the file does not say who serves which stage; add --stages N")
    if peers < asked:
        raise UsageError(f"--stages {asked}: {peers} peers cannot serve them; add links")
    if replicas is not None and asked * replicas != peers:
        raise UsageError(
            f"--replicas {replicas} of {asked} stages are {asked * replicas} "
            f"peers, but there are links of {peers}; leave --replicas out"
        )
    return asked


def _rules(known: Measurements, stages: int, run: StagesConfig, staged: "StageOptions") -> Rules:
    # A run that is not in stages says nothing of skips.
    run_skip = run.skip if run.skip or staged.stages is None else _SKIP
    skip, spread = _first(staged.skip, known.skip, run_skip), staged.spread
    try:
        visited = visited_stages(stages, skip)
        if spread is None:  # where nothing is skipped, whatever the others say of routes that skip
            spread = 0 if visited == stages else _first(known.spread, run.spread)
        return Rules(stages=stages, visited=visited, spread=spread)
    except ValueError as error:
        unequal = f" --spread {spread}" if spread else ""
        raise UsageError(f"--skip {skip:g}{unequal}: {error}") from error


def _sizes(known: Measurements, rules: Rules, staged: "StageOptions") -> tuple[int, ...]:
    """Replicas of each stage: as the file or an option says, else by how often it is visited."""
    if known.stages is not None:
        return tuple(map(len, known.stages))
    peers = len(known.names)
    if staged.replicas is not None or peers % rules.stages == 0:
        return (peers // rules.stages,) * rules.stages
    share = (rules.visited - 1) / max(1, rules.stages - 1)
    return stage_sizes(peers, [1.0, *[share] * (rules.stages - 1)])


def _model(
    known: Measurements,
    stages: int,
    config: "Config",
    given: "PlanOptions",
    staged: "StageOptions",
) -> StagedModel | None:
    """The run's model; None where the bytes and the times of visits are known without it."""
    sized = staged.activation_bytes is not None or known.activation_bytes is not None
    timed = staged.forward_ms is None and known.visits is None
    if given.measurements is not None:
        if not sized:
            raise UsageError("--links: the file has no activation_bytes; add --activation-bytes")
        if timed:
            raise UsageError(
                "--links: the file has forward_s of no peer; let the swarm run for an iteration, "
                "or add --forward-ms"
            )
    if not sized or timed:
        return staged_model(config, stages, timed=timed, threads=given.threads)
    return None


def _visits(
    known: Measurements, model: StagedModel | None, given: "PlanOptions", staged: "StageOptions"
) -> tuple[VisitTimes, str]:
    """(times that broadcast to peers times stages, where they come from)."""
    if staged.forward_ms is not None:
        forward_s = np.array(staged.forward_ms / 1e3)
        return VisitTimes(
            forward_s, _RECOMPUTED_RATIO * forward_s, LOSS_RATIO * forward_s
        ), "as given"
    if known.visits is not None:
        # What a peer took on its own stage; stages are cut to take about the same.
        return VisitTimes(*(each[:, None] for each in known.visits)), "as measured by the swarm"
    assert model is not None
    assert model.times_s is not None
    forward_s, backward_s, loss_s = model.times_s.T
    return VisitTimes(forward_s, backward_s, loss_s[:1]), given.time_source


def _first(*values: T | None) -> T:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)


# ------------------------------------------------------------------------------------ what is shown


def document_of(
    case: StageCase, answer: StagesAnswer, better: StagesAnswer | None
) -> dict[str, Any]:
    """Everything as plain values."""
    known, costs = case.known, answer.pipeline.costs
    return {
        "peers": list(known.names),
        "links": [str(link) for link in known.given],
        "stages": case.rules.stages,
        "visited": case.rules.visited,
        "skip": case.rules.skip_ratio,
        "spread": case.rules.spread,
        "microbatches": case.microbatches,
        "memory": list(case.swarm.memory),
        "activation_bytes": int(case.swarm.message_bytes),
        "forward_s": costs.forward_s.tolist(),
        "backward_s": costs.backward_s.tolist(),
        "loss_s": costs.loss_s.tolist(),
        "compute_source": case.source,
        "cut": None if case.cuts is None else case.cuts.document(),
        "not_measured": list(known.filled),
        "placement": "proposed" if known.stages is None else "measured",
        **_placed(case, answer),
        "better_placement": None if better is None else _placed(case, better),
    }


def _placed(case: StageCase, answer: StagesAnswer) -> dict[str, Any]:
    def names(peers: Sequence[int]) -> list[str]:
        return [case.known.names[peer] for peer in peers]

    return {
        "stage_peers": [names(replicas) for replicas in answer.pipeline.stages],
        "routings": [
            {
                "routing": routing,
                "visited": draws[0].rules.visited,
                "iteration_s": answer.iteration_s(routing),
                "draws": len(draws),
                "of_full": answer.of_full(routing),
                "utilization_of_peers": answer.utilization(routing),
                "in_flight": answer.most_held(routing),
                "routes": [names(route.peers) for route in draws[0].routes],
            }
            for routing, draws in answer.draws.items()
        ],
    }


def blocks_of(case: StageCase, answer: StagesAnswer, better: StagesAnswer | None) -> list[str]:
    """For people: what was asked, the placement, a row for each routing, the routes of `skip`."""
    blocks = [*_summary(case, answer), ""]
    if case.cuts is not None:
        blocks += [_cut_table(case.cuts), f"  {cut_remark(case.cuts)}\n"]
    blocks += [_placement_table(case, answer, better), _routings_table(answer, better)]
    blocks += [f"  {line}" for line in _remarks(case, answer, better)]
    return [*blocks, "", _routes_table(case, answer)]


def _summary(case: StageCase, answer: StagesAnswer) -> list[str]:
    pipeline, memory = answer.pipeline, case.swarm.memory
    costs = pipeline.costs
    holds = " to ".join(str(held) for held in sorted({min(memory), max(memory)}))
    lines = [
        f"{count(case.rules.stages, 'stage')}, {count(pipeline.peers, 'peer')}; each replica of "
        f"stage 0 begins {count(case.microbatches, 'microbatch')}; "
        f"routes that skip visit {_visits_of(case.rules)} stages",
        f"a visit: {_span(costs.forward_s)} forward, {_span(costs.backward_s)} backward, "
        f"{_span(costs.loss_s[list(pipeline.stages[0])])} loss, {case.source}",
        f"a hop: {size(case.swarm.message_bytes)}; messages of a peer leave one after "
        f"another; a peer holds {holds} microbatches at most",
    ]
    if case.known.filled:
        gaps = ", ".join(case.known.filled)
        lines.append(f"not measured: {gaps}; the median of the others stands for them")
    return lines


def _remarks(case: StageCase, answer: StagesAnswer, better: StagesAnswer | None) -> list[str]:
    """What the table of routings does not say."""
    (skip,) = answer.draws["skip"]
    assert skip.found is not None, "skip is searched"
    lines = [
        f"skip: {skip.found.spent_s:.2g} s of search, about; from {seconds(skip.found.first_s)} to "
        f"{seconds(skip.found.iteration_s)}",
        f"random: mean of {_RANDOM_DRAWS} draws",
    ]
    working = {peer for route in skip.routes for peer in route.peers}
    if resting := sorted(set(range(answer.pipeline.peers)) - working):
        lines.append(f"on no route of skip: {', '.join(case.known.names[p] for p in resting)}")
    if better is not None:
        skip_s = better.iteration_s("skip")
        share = percent(skip_s / answer.iteration_s("skip") - 1, 0, signed=True)
        lines.append(f"placement: with the better one, skip takes {seconds(skip_s)} ({share})")
    elif case.known.stages is not None:
        lines.append("placement: none better was found")
    return lines


def cut_remark(cuts: StageCuts) -> str:
    """Whether another cut is better, by how much, and how to take it."""
    source, own_s = (
        "of the settings" if cuts.from_settings else "by parameters",
        max(cuts.own.visit_s),
    )
    told = f"layers {source}: the slowest stage takes {seconds(own_s)}"
    if cuts.better is None:
        return f"{told}; no cut by measured time is much better"
    better_s = max(cuts.better.visit_s)
    share = percent(better_s / own_s - 1, 0, signed=True)
    layers = ",".join(map(str, cuts.better.layers))
    return f"{told}; better {seconds(better_s)} ({share}) by --set 'stages.layers=[{layers}]'"


def _cut_table(cuts: StageCuts) -> str:
    shown = [cuts.own, *([cuts.better] if cuts.better else [])]
    heads = ("layers", "a microbatch", "better", "a microbatch")[: 2 * len(shown)]
    rows = [
        [str(n), *(t for cut in shown for t in (str(cut.layers[n]), seconds(cut.visit_s[n])))]
        for n in range(len(cuts.own.layers))
    ]
    return text_table(("stage", *heads), rows, align=">" * (1 + len(heads)))


def _placement_table(case: StageCase, answer: StagesAnswer, better: StagesAnswer | None) -> str:
    known = case.known

    def described(peer: int) -> str:
        """Its name, and its link where each has one of its own."""
        link = f" ({known.given[peer]})" if len(set(known.given)) > 1 else ""
        return known.names[peer] + link

    shown = [each.pipeline.stages for each in (answer, better) if each is not None]
    heads = ("proposed" if known.stages is None else "as it is", "better")[: len(shown)]
    rows = [
        (str(stage), *(", ".join(map(described, stages[stage])) for stages in shown))
        for stage in range(case.rules.stages)
    ]
    return text_table(("stage", *heads), rows, align=">" + "<" * len(shown))


def _routings_table(answer: StagesAnswer, better: StagesAnswer | None) -> str:
    heads = ["visits", "iteration", "of full", "utilization", "in flight"]
    heads += [] if better is None else ["placed better", "of full"]
    rows = []
    for routing, draws in answer.draws.items():
        shares = answer.utilization(routing)
        mean, *ends = (percent(s, 0) for s in (statistics.fmean(shares), min(shares), max(shares)))
        cells = [
            routing,
            _visits_of(draws[0].rules),
            seconds(answer.iteration_s(routing)),
            f"{answer.of_full(routing):.2f}",
            f"{mean} ({' to '.join(ends)})",
            str(answer.most_held(routing)),
        ]
        if better is not None:
            better_s = better.iteration_s(routing)
            cells += [seconds(better_s), f"{better_s / answer.iteration_s('full'):.2f}"]
        rows.append(cells)
    return text_table(("routing", *heads), rows)


def _routes_table(case: StageCase, answer: StagesAnswer) -> str:
    routes, stages = answer.draws["skip"][0].routes, range(case.rules.stages)
    rows = []
    for number, route in enumerate(dict.fromkeys(routes), 1):
        by_stage = dict(zip(route.stages(answer.pipeline), route.peers, strict=True))
        cells = [case.known.names[by_stage[n]] if n in by_stage else "-" for n in stages]
        taken = " ".join(str(index) for index, other in enumerate(routes) if other == route)
        rows.append([str(number), *cells, taken])
    heads = ("routes of skip", *(f"stage {stage}" for stage in stages), "microbatches")
    return text_table(heads, rows, align=">" + "<" * (len(stages) + 1))


def _visits_of(rules: Rules) -> str:
    each = f"{rules.shortest} to {rules.longest}" if rules.spread else f"{rules.visited}"
    return f"{each} of {rules.stages}"


def _span(times_s: Floats) -> str:
    least, most = seconds(min(times_s)), seconds(max(times_s))
    return least if least == most else f"{least} to {most}"
