"""What `murmur plan --stages` found, as a document and for people."""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.placement import Groups
from algorithms.skippipe.prediction import Prediction
from algorithms.skippipe.route import Rules
from worker.cli.plan_stages_case import Case

if TYPE_CHECKING:
    from rich.console import Console

    from worker.cli.plan_stages_cut import Cuts

_PLAIN_WIDTH = 160


@dataclass(frozen=True)
class Row:
    """One routing. Args: draws: predictions with seeds in a row; routes of the first are told."""

    draws: tuple[Prediction, ...]

    @property
    def first(self) -> Prediction:
        return self.draws[0]

    @cached_property
    def iteration_s(self) -> float:
        """Mean over the draws."""
        return sum(draw.iteration_s for draw in self.draws) / len(self.draws)

    @property
    def of_bound(self) -> float:
        return self.iteration_s / self.first.bound_s

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
class Report:
    """Everything that the command found.

    Args:
        case: what was asked.
        pipeline: the peers on their stages: as measured, or else as proposed.
        rows: by routing.
        proposed: the peers of each stage in the searched placement.
        proposed_rows: by routing; None where the pipeline is placed so already.
    """

    case: Case
    pipeline: Pipeline
    rows: dict[str, Row]
    proposed: Groups
    proposed_rows: dict[str, Row] | None

    @property
    def better(self) -> dict[str, Row] | None:
        """By routing, with the searched placement; None if it is not faster."""
        rows = self.proposed_rows
        if rows is None or rows["skip"].iteration_s >= self.rows["skip"].iteration_s:
            return None
        return rows

    def of_full(self, row: Row) -> float:
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
            "shared_uplinks": case.shared_uplinks,
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

    def _routing(self, row: Row) -> dict[str, Any]:
        first = row.first
        told = {
            "routing": first.routing,
            "visited": first.rules.visited,
            "iteration_s": row.iteration_s,
            "draws": len(row.draws),
            "of_full": self.of_full(row),
            "bound_s": first.bound_s,
            "of_bound": row.of_bound,
            "utilization": row.mean_utilization,
            "utilization_of_peers": list(row.utilization),
            "in_flight_of_peers": list(row.peak),
            "routes": [self.peers(route.peers) for route in first.routes],
        }
        if first.found is not None:
            told["search"] = {
                "effort_s": first.found.spent_s,
                "first_s": first.found.first_s,
                "rejected": len(first.found.rejections),
            }
        return told


def print_report(report: Report) -> None:
    """For people: the placement, a row for each routing, and the routes of `skip`."""
    from rich.console import Console
    from rich.text import Text

    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    for line in summary(report):
        console.print(Text(line), soft_wrap=True)
    console.print()
    if report.case.cuts is not None:
        _print_cut(console, report.case.cuts)
    _print_placement(console, report)
    _print_routings(console, report)
    for line in remarks(report):
        console.print(Text(f"  {line}"), soft_wrap=True)
    console.print()
    _print_routes(console, report)


def summary(report: Report) -> list[str]:
    """What was predicted."""
    case, pipeline = report.case, report.pipeline
    costs, stages = pipeline.costs, len(pipeline.stages)
    memory = sorted(set(case.swarm.memory))
    holds = f"{memory[0]} to {memory[-1]}" if len(memory) > 1 else str(memory[0])
    uplinks = "leave one after another" if case.shared_uplinks else "do not delay each other"
    lines = [
        f"{_count(stages, 'stage')}, {_count(pipeline.peers, 'peer')}; each replica of stage 0 "
        f"begins {_count(case.microbatches, 'microbatch', 'es')}; "
        f"routes that skip visit {_visits(case.rules)} stages",
        f"a visit: {_span(costs.forward_s)} forward, {_span(costs.backward_s)} backward, "
        f"{_span(costs.loss_s[list(pipeline.stages[0])])} loss, {case.source}",
        f"a hop: {_bytes(case.swarm.message_bytes)}; messages of a peer {uplinks}; a peer holds "
        f"{holds} microbatches at most",
    ]
    if case.known.filled:
        gaps = ", ".join(case.known.filled)
        lines.append(f"not measured: {gaps}; the median of the others stands for them")
    return lines


def remarks(report: Report) -> list[str]:
    """What the table of routings does not say."""
    found, skip = report.rows["skip"].first.found, report.rows["skip"]
    assert found is not None, "skip is searched"
    lines = [
        f"skip: {found.spent_s:.2g} s of search, about; from {_time(found.first_s)} to "
        f"{_time(found.iteration_s)}, {skip.of_bound:.2f} times the lower bound; "
        f"{_count(len(found.rejections), 'candidate')} rejected",
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
        f"placement: with the better one, skip takes {_time(skip_s)} "
        f"({percent(share, signed=True)})",
    ]


def _print_placement(console: "Console", report: Report) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("stage", justify="right")
    table.add_column("proposed" if report.case.known.stages is None else "as it is")
    if report.better is not None:
        table.add_column("better")
    for stage, replicas in enumerate(report.pipeline.stages):
        cells = [str(stage), ", ".join(map(report.described, replicas))]
        if report.better is not None:
            cells.append(", ".join(map(report.described, report.proposed[stage])))
        table.add_row(*cells)
    console.print(table)


def _print_cut(console: "Console", cuts: "Cuts") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    better = cuts.better
    shown = [cuts.own] if better is None else [cuts.own, better]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("stage", justify="right")
    for name in ("layers", "better")[: len(shown)]:
        for column in (name, "a microbatch", "memory"):
            table.add_column(column, justify="right", no_wrap=True)
    for stage in range(len(cuts.own.layers)):
        cells = [str(stage)]
        for cut in shown:
            cells += [str(cut.layers[stage]), _time(cut.visit_s[stage])]
            cells.append(_bytes(cut.memory_bytes[stage]))
        table.add_row(*cells)
    console.print(table)
    console.print(Text(f"  {cut_remark(cuts)}"), soft_wrap=True)
    console.print()


def cut_remark(cuts: "Cuts") -> str:
    """Whether another cut is better, by how much, and how to take it."""
    own, better = cuts.own, cuts.better
    source = "of the settings" if cuts.from_settings else "by parameters"
    told = f"layers {source}: the slowest stage takes {_time(own.slowest_s)}"
    if better is None:
        return f"{told}; no cut by measured time is much better"
    if not cuts.own_fits:
        assert cuts.limit_bytes is not None
        told += f", the largest needs more than {_bytes(cuts.limit_bytes)}"
    share = percent(better.slowest_s / own.slowest_s - 1, signed=True)
    return f"{told}; better {_time(better.slowest_s)} ({share}) by {cuts.setting}"


def _print_routings(console: "Console", report: Report) -> None:
    from rich import box
    from rich.table import Table

    better = report.better
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("routing")
    for name in ("visits", "iteration", "of full", "bound", "of bound", "utilization", "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    if better is not None:
        table.add_column("placed better", justify="right", no_wrap=True)
        table.add_column("of full", justify="right", no_wrap=True)
    for routing, row in report.rows.items():
        first, each = row.first, row.utilization
        cells = [
            routing,
            _visits(first.rules),
            _time(row.iteration_s),
            f"{report.of_full(row):.2f}",
            _time(first.bound_s),
            f"{row.of_bound:.2f}",
            f"{percent(row.mean_utilization)} ({percent(min(each))} to {percent(max(each))})",
            str(max(row.peak)),
        ]
        if better is not None:
            cells += [
                _time(better[routing].iteration_s),
                f"{report.of_full(better[routing]):.2f}",
            ]
        table.add_row(*cells)
    console.print(table)


def _print_routes(console: "Console", report: Report) -> None:
    from rich import box
    from rich.table import Table

    pipeline, routes = report.pipeline, report.rows["skip"].first.routes
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("routes of skip", justify="right")
    for stage in range(len(pipeline.stages)):
        table.add_column(f"stage {stage}", no_wrap=True)
    table.add_column("microbatches")
    for number, route in enumerate(dict.fromkeys(routes), 1):
        by_stage = dict(zip(route.stages(pipeline), report.peers(route.peers), strict=True))
        taken = [str(index) for index, other in enumerate(routes) if other == route]
        table.add_row(
            str(number),
            *(by_stage.get(stage, "-") for stage in range(len(pipeline.stages))),
            " ".join(taken),
        )
    console.print(table)


def percent(share: float, *, signed: bool = False) -> str:
    return f"{100 * share:{'+' if signed else ''}.0f} %"


def _visits(rules: Rules) -> str:
    each = f"{rules.shortest} to {rules.longest}" if rules.spread else f"{rules.visited}"
    return f"{each} of {rules.stages}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _span(times_s: Any) -> str:
    least, most = _time(min(times_s)), _time(max(times_s))
    return least if least == most else f"{least} to {most}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:.0f} B"
