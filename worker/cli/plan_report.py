"""What `murmur plan` found, as a document and for people."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import click

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.proposals import PERIODS, Proposal, bits_per_parameter
from murmuration.algorithms.utilization import PlanPrediction, Workload
from murmuration.protos.figures import count, optional, percent, rate, ratio, seconds, size
from murmuration.worker.views.summary import text_table


@dataclass(frozen=True, kw_only=True)
class LinkAnswer:
    """For one link.

    Args:
        needed_mbps: by utilization, of the run's own plan.
        least_mbps: without a proposal, the speed at which there would be one.
    """

    link: Link
    prediction: PlanPrediction
    needed_mbps: dict[float, float | None]
    proposals: list[Proposal]
    least_mbps: float | None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything that the command found.

    Args:
        name, workload, step_source: the model, and where the time of its step comes from.
        preset, own: of the run.
    """

    name: str
    workload: Workload
    step_source: str
    peers: int
    target: float
    preset: str
    own: Plan
    answers: tuple[LinkAnswer, ...]

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "task": self.name,
            "layers": len(self.workload.layers),
            "parameters": self.workload.parameters,
            "parameters_outside_layers": self.workload.outside,
            "ddp_parameters": self.workload.ddp_parameters or self.workload.parameters,
            "step_s": self.workload.step_s,
            "step_source": self.step_source,
            "peers": self.peers,
            "target": self.target,
            "preset": self.preset,
            "plan": dataclasses.asdict(self.own),
            "links": [self._answer(answer) for answer in self.answers],
        }

    def _answer(self, answer: LinkAnswer) -> dict[str, Any]:
        return {
            "link": str(answer.link),
            "prediction": dataclasses.asdict(answer.prediction),
            "needed_mbps": {str(share): mbps for share, mbps in answer.needed_mbps.items()},
            "proposals": [
                {
                    "arguments": arguments_of(proposal),
                    "plan": dataclasses.asdict(proposal.plan),
                    "bits_per_parameter": bits_per_parameter(proposal.plan),
                    "prediction": dataclasses.asdict(proposal.prediction),
                }
                for proposal in answer.proposals
            ],
            "needed_for_any_proposal_mbps": answer.least_mbps,
        }


def arguments_of(proposal: Proposal) -> list[str]:
    """What to add to the command line of `murmur up`. A step is a round of ddp by itself."""
    period = f"diloco.inner_steps={proposal.plan.inner_steps}"
    ddp = proposal.plan.payload == "gradient"
    return ["--preset", proposal.preset, *(() if ddp else ("--set", period))]


def print_report(report: PlanReport) -> None:
    """For people: the run's own plan and the proposals, link by link."""
    work = report.workload
    outside = f" ({work.outside:,} of them outside the layers)" if work.outside else ""
    model = f"{count(len(work.layers), 'layer')}, {work.parameters:,} parameters{outside}"
    if work.ddp_parameters is not None:
        model = f"{work.parameters:,} coefficients for {work.ddp_parameters:,} parameters"
    click.echo(f"{report.name}: {model}; {seconds(work.step_s)} a step, {report.step_source}")
    for answer in report.answers:
        click.secho(f"\n{report.peers} peers, each on {answer.link}", bold=True)
        for label, text in own_lines(report, answer):
            click.echo(f"  {label:<13} {text}")
        if not answer.proposals:
            click.echo(f"  {unreachable(report, answer)}")
            continue
        click.echo(_table(report, answer))
        for rank, proposal in enumerate(answer.proposals, 1):
            click.echo(f"  {rank}  {' '.join(arguments_of(proposal))}")
        if answer.proposals[0].plan.payload == "gradient":
            click.echo("  This link carries the gradients of every step: nothing is lost with ddp.")


def own_lines(report: PlanReport, answer: LinkAnswer) -> list[tuple[str, str]]:
    """(label, text) of what the run's own plan does on a link."""
    told, own = answer.prediction, report.own
    fragments = len(report.workload.fragments(own.fragments, own.pattern))
    lines = [
        (
            "this run",
            f"{report.preset}: H {own.inner_steps}, {count(fragments, 'fragment')}, "
            f"tau {own.overlap_steps}, {_codecs(own)}",
        ),
        (
            "utilization",
            f"{percent(told.utilization)}; {seconds(told.stall_s_per_period)} waiting in a period "
            f"of {seconds(told.period_s)}",
        ),
    ]
    if told.ddp_ratio is None:
        return [*lines, ("sent", "nothing")]
    given = count(max(1, own.overlap_steps), "step")
    speeds = (f"{percent(share)}: {_speed(mbps)}" for share, mbps in answer.needed_mbps.items())
    return [
        *lines,
        (
            "sent",
            f"{size(told.bytes_per_step)} per worker and step, {size(told.bytes_per_sync)} "
            "per sync of all parameters; as much is received",
        ),
        ("bf16 DDP", f"would send {ratio(told.ddp_ratio)} as much"),
        (
            "link",
            f"busy {percent(told.link_share)} of the time; what is sent at once takes "
            f"{ratio(told.peak_link_share)} the {given} it has",
        ),
        ("speed needed", ", ".join(speeds)),
    ]


def unreachable(report: PlanReport, answer: LinkAnswer) -> str:
    """Why nothing is proposed."""
    tried = f"no H up to {PERIODS[-1]} reaches {percent(report.target)} on this link"
    if answer.least_mbps is None:
        return f"{tried}, nor on any with its delay; lower --target"
    return f"{tried}; it takes {_speed(answer.least_mbps)}, or a lower --target"


def _table(report: PlanReport, answer: LinkAnswer) -> str:
    heads = ("H", "fragments", "tau", "bits", "utilization", "waiting", "sent/step", "DDP/it")
    return text_table(
        (f"for {percent(report.target)}", *heads, "codec"),
        [
            (str(rank), *_cells(report.workload, proposal))
            for rank, proposal in enumerate(answer.proposals, 1)
        ],
        align="<>>>>>>>><",
    )


def _cells(work: Workload, proposal: Proposal) -> tuple[str, ...]:
    plan, told = proposal.plan, proposal.prediction
    return (
        str(plan.inner_steps),
        str(len(work.fragments(plan.fragments, plan.pattern))),
        str(plan.overlap_steps),
        f"{bits_per_parameter(plan):.3g}",
        percent(told.utilization),
        f"{seconds(told.stall_s_per_period)} of {seconds(told.period_s)}",
        size(told.bytes_per_step),
        optional(told.ddp_ratio, lambda times: f"{times:,.1f}"),
        _codecs(plan),
    )


def _codecs(plan: Plan) -> str:
    same = plan.codec == plan.reduction_codec
    return plan.codec if same else f"{plan.codec}, back {plan.reduction_codec}"


def _speed(mbps: float | None) -> str:
    return "none is enough" if mbps is None else rate(mbps)
