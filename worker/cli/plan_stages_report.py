"""What `murmur plan --stages` found: as a document, and as tables."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click

from murmuration.algorithms.skippipe.assignment import Groups, StageCandidates
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Rules
from murmuration.algorithms.skippipe.routing import RoutingPrediction
from murmuration.protos.figures import count, percent, seconds, size
from murmuration.worker.cli.plan_measurements import Measurements
from murmuration.worker.cli.plan_stages_cut import StageCuts
from murmuration.worker.views.table import text_table


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
        seed: as `predict` takes it.
    """

    known: Measurements
    sizes: tuple[int, ...]
    rules: Rules
    microbatches: int
    swarm: StageCandidates
    cuts: StageCuts | None
    source: str
    seed: int


@dataclass(frozen=True)
class RoutingRow:
    """One routing. Args: draws: predictions with seeds in a row; routes of the first are told."""

    draws: tuple[RoutingPrediction, ...]

    @property
    def first(self) -> RoutingPrediction:
        return self.draws[0]

    @cached_property
    def iteration_s(self) -> float:
        """Mean over the draws."""
        return sum(draw.iteration_s for draw in self.draws) / len(self.draws)

    @cached_property
    def utilization(self) -> tuple[float, ...]:
        """Of each peer, mean over the draws."""
        each = zip(*(draw.utilization for draw in self.draws), strict=True)
        return tuple(sum(shares) / len(shares) for shares in each)

    @property
    def mean_utilization(self) -> float:
        return sum(self.utilization) / len(self.utilization)

    @property
    def peak(self) -> tuple[int, ...]:
        """Of each peer, the most microbatches that it held at once, in any draw."""
        return tuple(max(held) for held in zip(*(d.timeline.peak for d in self.draws), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesReport:
    """Everything that the command found.

    Args:
        case: what was asked.
        pipeline: the peers on their stages: as measured, or else as proposed.
        rows: by routing.
        proposed: the peers of each stage in the searched placement.
        proposed_rows: by routing; None where the pipeline is placed so already.
    """

    case: StageCase
    pipeline: Pipeline
    rows: dict[str, RoutingRow]
    proposed: Groups
    proposed_rows: dict[str, RoutingRow] | None

    @property
    def better(self) -> dict[str, RoutingRow] | None:
        """By routing, with the searched placement; None if it is not faster."""
        rows = self.proposed_rows
        if rows is None or rows["skip"].iteration_s >= self.rows["skip"].iteration_s:
            return None
        return rows

    def of_full(self, row: RoutingRow) -> float:
        """Iteration time over that of `full` on the same placement as the pipeline's."""
        return row.iteration_s / self.rows["full"].iteration_s

    def peers(self, replicas: tuple[int, ...]) -> list[str]:
        return [self.case.known.names[peer] for peer in replicas]

    def described(self, peer: int) -> str:
        """Its name, and its link where each has one of its own."""
        known = self.case.known
        given = known.given
        return f"{known.names[peer]} ({given[peer]})" if len(set(given)) > 1 else known.names[peer]

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        case, costs = self.case, self.pipeline.costs
        better = self.better
        return {
            "peers": list(case.known.names),
            "links": [str(link) for link in case.known.given],
            "stages": len(self.pipeline.stages),
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
            "seed": case.seed,
            "not_measured": list(case.known.filled),
            "placement": {
                "source": "proposed" if case.known.stages is None else "measured",
                "stages": [self.peers(replicas) for replicas in self.pipeline.stages],
            },
            "routings": [self._routing(row) for row in self.rows.values()],
            "better_placement": None
            if better is None
            else {
                "stages": [self.peers(replicas) for replicas in self.proposed],
                "routings": [self._routing(row) for row in better.values()],
            },
        }

    def _routing(self, row: RoutingRow) -> dict[str, Any]:
        first = row.first
        told = {
            "routing": first.routing,
            "visited": first.rules.visited,
            "iteration_s": row.iteration_s,
            "draws": len(row.draws),
            "of_full": self.of_full(row),
            "utilization": row.mean_utilization,
            "utilization_of_peers": list(row.utilization),
            "in_flight_of_peers": list(row.peak),
            "routes": [self.peers(route.peers) for route in first.routes],
        }
        if first.found is not None:
            told["search"] = {
                "effort_s": first.found.spent_s,
                "first_s": first.found.first_s,
            }
        return told


def print_report(report: StagesReport) -> None:
    """For people: the placement, a row for each routing, and the routes of `skip`."""
    for line in (*summary(report), ""):
        click.echo(line)
    if report.case.cuts is not None:
        click.echo(_cut_table(report.case.cuts))
        click.echo(f"  {cut_remark(report.case.cuts)}\n")
    click.echo(_placement_table(report))
    click.echo(_routings_table(report))
    for line in (*remarks(report), ""):
        click.echo(f"  {line}".rstrip())
    click.echo(_routes_table(report))


def summary(report: StagesReport) -> list[str]:
    """What was predicted."""
    case, pipeline = report.case, report.pipeline
    costs, stages = pipeline.costs, len(pipeline.stages)
    memory = sorted(set(case.swarm.memory))
    holds = f"{memory[0]} to {memory[-1]}" if len(memory) > 1 else str(memory[0])
    lines = [
        f"{count(stages, 'stage')}, {count(pipeline.peers, 'peer')}; each replica of stage 0 "
        f"begins {count(case.microbatches, 'microbatch')}; "
        f"routes that skip visit {_visits(case.rules)} stages",
        f"a visit: {_span(costs.forward_s)} forward, {_span(costs.backward_s)} backward, "
        f"{_span(costs.loss_s[list(pipeline.stages[0])])} loss, {case.source}",
        f"a hop: {size(case.swarm.message_bytes)}; messages of a peer leave one after "
        f"another; a peer holds {holds} microbatches at most",
    ]
    if case.known.filled:
        gaps = ", ".join(case.known.filled)
        lines.append(f"not measured: {gaps}; the median of the others stands for them")
    return lines


def remarks(report: StagesReport) -> list[str]:
    """What the table of routings does not say."""
    found, skip = report.rows["skip"].first.found, report.rows["skip"]
    assert found is not None, "skip is searched"
    lines = [
        f"skip: {found.spent_s:.2g} s of search, about; from {seconds(found.first_s)} to "
        f"{seconds(found.iteration_s)}",
        f"random: mean of {len(report.rows['random'].draws)} draws",
    ]
    working = {peer for route in skip.first.routes for peer in route.peers}
    if resting := tuple(sorted(set(range(report.pipeline.peers)) - working)):
        lines.append(f"on no route of skip: {', '.join(report.peers(resting))}")
    if report.case.known.stages is None:
        return lines
    if report.better is None:
        return [*lines, "placement: none better was found"]
    skip_s = report.better["skip"].iteration_s
    share = skip_s / skip.iteration_s - 1
    return [
        *lines,
        f"placement: with the better one, skip takes {seconds(skip_s)} "
        f"({percent(share, 0, signed=True)})",
    ]


def _placement_table(report: StagesReport) -> str:
    shown = [report.pipeline.stages, *([report.proposed] if report.better else [])]
    heads = ("proposed" if report.case.known.stages is None else "as it is", "better")
    rows = [
        (str(stage), *(", ".join(map(report.described, stages[stage])) for stages in shown))
        for stage in range(len(report.pipeline.stages))
    ]
    return text_table(("stage", *heads[: len(shown)]), rows, align=">" + "<" * len(shown))


def _cut_table(cuts: StageCuts) -> str:
    shown = [cuts.own, *([cuts.better] if cuts.better else [])]
    heads = ("layers", "a microbatch", "memory", "better", "a microbatch", "memory")
    rows = []
    for stage in range(len(cuts.own.layers)):
        row = [str(stage)]
        for cut in shown:
            row += [str(cut.layers[stage]), seconds(cut.visit_s[stage])]
            row.append(size(cut.memory_bytes[stage]))
        rows.append(row)
    return text_table(("stage", *heads[: 3 * len(shown)]), rows, align=">" * (1 + 3 * len(shown)))


def cut_remark(cuts: StageCuts) -> str:
    """Whether another cut is better, by how much, and how to take it."""
    own, better = cuts.own, cuts.better
    source = "of the settings" if cuts.from_settings else "by parameters"
    told = f"layers {source}: the slowest stage takes {seconds(own.slowest_s)}"
    if better is None:
        return f"{told}; no cut by measured time is much better"
    if not cuts.own_fits:
        assert cuts.limit_bytes is not None
        told += f", the largest needs more than {size(cuts.limit_bytes)}"
    share = percent(better.slowest_s / own.slowest_s - 1, 0, signed=True)
    return f"{told}; better {seconds(better.slowest_s)} ({share}) by {cuts.setting}"


def _routings_table(report: StagesReport) -> str:
    heads = ["visits", "iteration", "of full", "utilization", "in flight"]
    if report.better is not None:
        heads += ["placed better", "of full"]
    rows = []
    for routing, row in report.rows.items():
        each = [_whole(share) for share in (min(row.utilization), max(row.utilization))]
        cells = [
            routing,
            _visits(row.first.rules),
            seconds(row.iteration_s),
            f"{report.of_full(row):.2f}",
            f"{_whole(row.mean_utilization)} ({' to '.join(each)})",
            str(max(row.peak)),
        ]
        if report.better is not None:
            better = report.better[routing]
            cells += [seconds(better.iteration_s), f"{report.of_full(better):.2f}"]
        rows.append(cells)
    return text_table(("routing", *heads), rows)


def _routes_table(report: StagesReport) -> str:
    pipeline, routes = report.pipeline, report.rows["skip"].first.routes
    stages = range(len(pipeline.stages))
    rows = []
    for number, route in enumerate(dict.fromkeys(routes), 1):
        by_stage = dict(zip(route.stages(pipeline), report.peers(route.peers), strict=True))
        taken = [str(index) for index, other in enumerate(routes) if other == route]
        rows.append([str(number), *(by_stage.get(n, "-") for n in stages), " ".join(taken)])
    heads = ("routes of skip", *(f"stage {stage}" for stage in stages), "microbatches")
    return text_table(heads, rows, align=">" + "<" * (len(stages) + 1))


def _whole(share: float) -> str:
    return percent(share, 0)


def _visits(rules: Rules) -> str:
    each = f"{rules.shortest} to {rules.longest}" if rules.spread else f"{rules.visited}"
    return f"{each} of {rules.stages}"


def _span(times_s: Any) -> str:
    least, most = seconds(min(times_s)), seconds(max(times_s))
    return least if least == most else f"{least} to {most}"
