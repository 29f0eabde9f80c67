"""An iteration of a model in stages by each routing, and who would serve which stage.

    python -m tests.lab plan-stages --stages 4 --link 20mbit --forward-ms 100 \
        --activation-bytes 98304
    python -m tests.lab plan-stages --links runs/NAME/w0/links.json

The links are given, one for all peers or one for each, or are what a swarm in stages has measured.
Nothing is started and nothing is sent.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from murmuration.algorithms.link import Link, parse_link
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
    origins_in_turns,
)
from murmuration.algorithms.skippipe.search import EFFORT_S
from murmuration.protos.figures import count, percent, seconds, size
from murmuration.worker.views.summary import text_table
from tests.lab.placement import (
    Groups,
    RoutingPrediction,
    StageCandidates,
    links_of_lines,
    predict,
    propose_placement,
)

T = TypeVar("T")

_REPLICAS, _SKIP, _MEMORY, _MICROBATCHES = 2, 0.25, 3, 8
_RANDOM_DRAWS = 20
_RECOMPUTED_RATIO = 1 + BACKWARD_RATIO  # a backward computes its stage's forward again


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked; None where the file or a default says it. `main` has the words."""

    links: tuple[str, ...]
    stages: int | None = None
    replicas: int | None = None
    skip: float | None = None
    spread: int | None = None
    microbatches: int | None = None
    memory: int | None = None
    forward_ms: float | None = None
    activation_bytes: int | None = None


def main() -> int:
    """Predicts on the measured placement or else on the proposed one, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = "RATE[,delay=TIME], again for each peer or with ; between, or FILE.json"
    parser.add_argument("--links", "--link", action="append", required=True, help=text)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--replicas", type=int, help=f"of each stage; {_REPLICAS}")
    parser.add_argument("--skip", type=float, help=f"share of the stages of a route; {_SKIP}")
    parser.add_argument("--spread", type=int, help="half visit this many stages more, half fewer")
    parser.add_argument("--microbatches", type=int, help="of each origin")
    parser.add_argument("--memory", type=int, help=f"microbatches that a peer holds; {_MEMORY}")
    parser.add_argument("--forward-ms", type=float, help="of a visit; else of the file")
    parser.add_argument("--activation-bytes", type=int, help="of a hop; else of the file")
    given = vars(parser.parse_args())
    try:
        case = case_of(Options(**given | {"links": tuple(given["links"])}))
    except ValueError as error:
        raise SystemExit(f"plan-stages: {error}") from error
    proposed = case.proposed()
    answer, better = StagesAnswer.of(case, case.known.stages or proposed), None
    if case.known.stages not in (None, proposed):
        better = StagesAnswer.of(case, proposed)
        if better.iteration_s("skip") >= answer.iteration_s("skip"):
            better = None
    print(*blocks_of(case, answer, better), sep="\n")
    return 0


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
    """Reads what a staged worker writes. Raises ValueError: no such file, or nothing measured."""
    try:
        entries = json.loads(path.read_bytes())
        names, served = tuple(entries["peers"]), entries.get("stage")
    except (OSError, KeyError) as error:
        raise ValueError(f"--links {path}: {error}") from error
    everyone, gaps = range(len(names)), list[str]()
    pairs = ~np.eye(len(names), dtype=bool)
    stages = served and tuple(
        tuple(peer for peer in everyone if served[peer] == stage)
        for stage in range(max(served) + 1)
    )

    def numbers(name: str, what: str, read: Any = True) -> Floats | None:
        """An array in which the median stands for what is null; None if all of it is."""
        values = np.array(entries.get(name) or [None] * len(names), dtype=np.float64)
        read = np.broadcast_to(read, values.shape)
        missing = np.isnan(values)
        if missing[read].all():
            return None
        if filled := int(missing[read].sum()):
            gaps.append(f"{filled} of {read.sum()} {what}")
        values[missing] = np.median(values[~missing & read])
        return values

    latency_s = numbers("latency_s", "latencies", pairs)
    rate_bytes_per_s = numbers("rate_bytes_per_s", "rates", pairs)
    if latency_s is None or rate_bytes_per_s is None:
        raise ValueError(f"--links {path}: nothing is measured between any two peers")
    visits, forward_s = None, numbers("forward_s", "forward times")
    if forward_s is not None:
        backward_s = numbers("backward_s", "backward times")
        # Only stage 0 computes losses: that the others measured none is no gap.
        origins = np.isin(everyone, stages[0]) if stages else True
        loss_s = numbers("loss_s", "loss times", origins)
        visits = VisitTimes(
            forward_s,
            _RECOMPUTED_RATIO * forward_s if backward_s is None else backward_s,
            LOSS_RATIO * forward_s if loss_s is None else loss_s,
        )
    memory = numbers("memory", "memories")
    return Measurements(
        names=names,
        links=Links(latency_s=latency_s, rate_bytes_per_s=rate_bytes_per_s),
        stages=stages,
        visits=visits,
        memory=None if memory is None else tuple(max(1, int(held)) for held in memory),
        activation_bytes=entries.get("activation_bytes"),
        microbatches=entries.get("microbatches"),
        skip=entries.get("skip"),
        spread=entries.get("spread"),
        filled=tuple(gaps),
    )


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
        source: where the times of visits come from.
    """

    known: Measurements
    sizes: tuple[int, ...]
    rules: Rules
    microbatches: int
    swarm: StageCandidates
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


def case_of(options: Options) -> StageCase:
    """Raises ValueError, with the fix."""
    first, *others = options.links
    if first.endswith(".json"):
        if others:
            raise ValueError(f"--links {first} has all links; leave the other --links out")
        known = read_links(Path(first))
    else:
        known = _of_lines(options)
    stages = _stages(known, options)
    rules = _rules(known, stages, options)
    visits, source = _visits(known, options)
    memory = known.memory
    if options.memory is not None or memory is None:
        memory = (_first(options.memory, _MEMORY),) * len(known.names)
    message_bytes = _first(options.activation_bytes, known.activation_bytes, 0)
    if not message_bytes:
        raise ValueError("how many bytes is a hop? add --activation-bytes")
    rows = (len(known.names), stages)
    return StageCase(
        known=known,
        sizes=_sizes(known, rules, options),
        rules=rules,
        microbatches=_first(options.microbatches, known.microbatches, _MICROBATCHES),
        swarm=StageCandidates(
            links=known.links,
            message_bytes=message_bytes,
            memory=memory,
            forward_s=np.broadcast_to(visits.forward_s, rows),
            backward_s=np.broadcast_to(visits.backward_s, rows),
            loss_s=np.broadcast_to(visits.loss_s, rows)[:, 0],
        ),
        source=source,
    )


def _of_lines(options: Options) -> Measurements:
    """Peers w0, w1, ...: one link for all, or one for each."""
    links = [parse_link(part) for text in options.links for part in text.split(";")]
    if any(link.jitter_s or link.loss for link in links):
        raise ValueError("--link: stages are predicted without jitter and loss; drop them")
    if len(links) == 1:
        links *= (options.stages or 1) * (options.replicas or _REPLICAS)
    names = tuple(f"w{index}" for index in range(len(links)))
    return Measurements(names=names, links=links_of_lines(links), given=tuple(links))


def _stages(known: Measurements, options: Options) -> int:
    """How many there are."""
    peers, asked, replicas = len(known.names), options.stages, options.replicas
    if known.stages is not None:
        if asked not in (None, len(known.stages)) or replicas is not None:
            raise ValueError("the file says who serves which stage: no --stages and --replicas")
        return len(known.stages)
    if asked is None or peers < asked or (replicas or 0) * asked not in (0, peers):
        raise ValueError(f"{peers} peers cannot serve {asked} stages of {replicas} replicas")
    return asked


def _rules(known: Measurements, stages: int, options: Options) -> Rules:
    visited = visited_stages(stages, _first(options.skip, known.skip, _SKIP))
    spread = options.spread
    if spread is None:  # where nothing is skipped, whatever the file says of routes that skip
        spread = 0 if visited == stages else _first(known.spread, 0)
    return Rules(stages=stages, visited=visited, spread=spread)


def stage_sizes(peers: int, stage_load_s: Sequence[float]) -> tuple[int, ...]:
    """How many replicas each stage gets: the next peer always goes to the most loaded stage.

    Args:
        peers: at least one for each stage.
        stage_load_s: of each stage, the time of a visit times how often it is visited.

    Raises:
        ValueError: fewer peers than stages.
    """
    if peers < len(stage_load_s):
        raise ValueError(f"{peers} peers cannot serve {len(stage_load_s)} stages: add peers")
    sizes = [1] * len(stage_load_s)
    for _ in range(peers - len(sizes)):
        loads_s = [load_s / size for load_s, size in zip(stage_load_s, sizes, strict=True)]
        sizes[loads_s.index(max(loads_s))] += 1
    return tuple(sizes)


def _sizes(known: Measurements, rules: Rules, options: Options) -> tuple[int, ...]:
    """Replicas of each stage: as the file or an option says, else by how often it is visited."""
    if known.stages is not None:
        return tuple(map(len, known.stages))
    peers = len(known.names)
    if options.replicas is not None or peers % rules.stages == 0:
        return (peers // rules.stages,) * rules.stages
    share = (rules.visited - 1) / max(1, rules.stages - 1)
    return stage_sizes(peers, [1.0, *[share] * (rules.stages - 1)])


def _visits(known: Measurements, options: Options) -> tuple[VisitTimes, str]:
    """(times that broadcast to peers times stages, where they come from)."""
    if options.forward_ms is not None:
        forward_s = np.array(options.forward_ms / 1e3)
        return VisitTimes(
            forward_s, _RECOMPUTED_RATIO * forward_s, LOSS_RATIO * forward_s
        ), "as given"
    if known.visits is None:
        raise ValueError("how long does a visit take? add --forward-ms")
    # What a peer took on its own stage; stages are cut to take about the same.
    return VisitTimes(*(each[:, None] for each in known.visits)), "as measured by the swarm"


def _first(*values: T | None) -> T:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)


# ------------------------------------------------------------------------------------ what is shown


def blocks_of(case: StageCase, answer: StagesAnswer, better: StagesAnswer | None) -> list[str]:
    """For people: what was asked, the placement, a row for each routing, the routes of `skip`."""
    blocks = [*_summary(case, answer), ""]
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
        share = f"{100 * (skip_s / answer.iteration_s('skip') - 1):+.0f} %"
        lines.append(f"placement: with the better one, skip takes {seconds(skip_s)} ({share})")
    elif case.known.stages is not None:
        lines.append("placement: none better was found")
    return lines


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


if __name__ == "__main__":
    raise SystemExit(main())
