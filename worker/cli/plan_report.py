"""What `murmur plan` found, as a document and for people."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from algorithms.link import Link
from algorithms.plan import Plan
from algorithms.utilization import MAX_INNER_STEPS, Prediction, Proposal, Proposals, Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Answer:
    """For one link. Args: needed_mbps: by utilization, of the run's own plan."""

    link: Link
    prediction: Prediction
    needed_mbps: dict[float, float | None]
    proposals: Proposals


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the command found.

    Args:
        name, workload, step_source: the model, and where the time of its step comes from.
        preset: of the run's own plan, which is `bases[preset]`.
        bases: by preset, the plan that typing `--preset` gives; proposals are told against them.
    """

    name: str
    workload: Workload
    step_source: str
    peers: int
    target: float
    preset: str
    bases: dict[str, Plan]
    answers: tuple[Answer, ...]

    @property
    def own(self) -> Plan:
        return self.bases[self.preset]

    def arguments(self, proposal: Proposal) -> list[str]:
        """What to add to the command line of `murmur up` for a proposed plan."""
        base = self.bases[proposal.base]
        arguments = [] if proposal.base == self.preset else ["--preset", proposal.base]
        for field in dataclasses.fields(base):
            value = getattr(proposal.plan, field.name)
            # Another period would bring another overlap with it.
            moved = field.name == "overlap_steps" and proposal.plan.inner_steps != base.inner_steps
            if value != getattr(base, field.name) or (moved and value):
                text = str(value).lower() if isinstance(value, bool) else str(value)
                arguments += ["--set", f"diloco.{field.name}={text}"]
        return arguments

    def document(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "task": self.name,
            "layers": len(self.workload.layers),
            "parameters": self.workload.parameters,
            "parameters_outside_layers": self.workload.outside,
            "step_s": self.workload.step_s,
            "step_source": self.step_source,
            "peers": self.peers,
            "target": self.target,
            "preset": self.preset,
            "plan": dataclasses.asdict(self.own),
            "links": [self._answer(answer) for answer in self.answers],
        }

    def _answer(self, answer: Answer) -> dict[str, Any]:
        return {
            "link": str(answer.link),
            "prediction": dataclasses.asdict(answer.prediction),
            "needed_mbps": {str(share): mbps for share, mbps in answer.needed_mbps.items()},
            "proposals": [
                {
                    "arguments": self.arguments(proposal),
                    "plan": dataclasses.asdict(proposal.plan),
                    "bits_per_parameter": proposal.bits,
                    "prediction": dataclasses.asdict(proposal.prediction),
                }
                for proposal in answer.proposals.ranked
            ],
            "needed_for_any_proposal_mbps": answer.proposals.needed_mbps,
        }


def print_report(report: Report) -> None:
    """For people: the run's own plan and the proposals, link by link."""
    from rich.console import Console
    from rich.text import Text

    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    work = report.workload
    outside = f" ({work.outside:,} of them outside the layers)" if work.outside else ""
    _line(
        console,
        f"{report.name}: {_count(len(work.layers), 'layer')}, {work.parameters:,} parameters"
        f"{outside}; {_time(work.step_s)} a step, {report.step_source}",
    )
    for answer in report.answers:
        console.print()
        console.print(Text(f"{report.peers} peers, each on {answer.link}", style="bold"))
        for label, text in own_lines(report, answer):
            _line(console, f"  {label:<13} {text}")
        if not answer.proposals.ranked:
            _line(console, f"  {unreachable(report, answer)}")
            continue
        console.print(_table(report, answer))
        for rank, proposal in enumerate(answer.proposals.ranked, 1):
            _line(console, f"  {rank}  {' '.join(report.arguments(proposal)) or 'as it is'}")


def own_lines(report: Report, answer: Answer) -> list[tuple[str, str]]:
    """(label, text) of what the run's own plan does on a link."""
    told, own = answer.prediction, report.own
    fragments = len(report.workload.fragments(own.fragments, own.pattern))
    lines = [
        (
            "this run",
            f"{report.preset}: H {own.inner_steps}, {_count(fragments, 'fragment')}, "
            f"tau {own.overlap_steps}, {_codecs(own)}",
        ),
        (
            "utilization",
            f"{_percent(told.utilization)}; {_time(told.stall_s_per_period)} waiting in a period "
            f"of {_time(told.period_s)}",
        ),
    ]
    if told.ddp_ratio is None:
        return [*lines, ("sent", "nothing")]
    given = _count(max(1, own.overlap_steps), "step")
    speeds = (f"{_percent(share)}: {_speed(mbps)}" for share, mbps in answer.needed_mbps.items())
    return [
        *lines,
        (
            "sent",
            f"{_bytes(told.bytes_per_step)} per worker and step, {_bytes(told.bytes_per_sync)} "
            "per sync of all parameters; as much is received",
        ),
        ("bf16 DDP", f"would send {_times(told.ddp_ratio)} as much"),
        (
            "link",
            f"busy {_percent(told.link_share)} of the time; what is sent at once takes "
            f"{_times(told.peak_link_share)} the {given} it has",
        ),
        ("speed needed", ", ".join(speeds)),
    ]


def unreachable(report: Report, answer: Answer) -> str:
    """Why nothing is proposed."""
    tried = f"no H up to {MAX_INNER_STEPS} reaches {_percent(report.target)} on this link"
    if answer.proposals.needed_mbps is None:
        return f"{tried}, nor on any with its delay; lower --target"
    return f"{tried}; it takes {_speed(answer.proposals.needed_mbps)}, or a lower --target"


def _table(report: Report, answer: Answer) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"for {_percent(report.target)}")
    for name in ("H", "fragments", "tau", "bits", "utilization", "waiting", "sent/step", "DDP/it"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    for rank, proposal in enumerate(answer.proposals.ranked, 1):
        plan, told = proposal.plan, proposal.prediction
        table.add_row(
            str(rank),
            str(plan.inner_steps),
            str(proposal.fragments),
            str(plan.overlap_steps),
            f"{proposal.bits:.3g}",
            _percent(told.utilization),
            f"{_time(told.stall_s_per_period)} of {_time(told.period_s)}",
            _bytes(told.bytes_per_step),
            "-" if told.ddp_ratio is None else f"{told.ddp_ratio:,.1f}",
            _codecs(plan),
        )
    return table


def _line(console: "Console", text: str) -> None:
    """In one piece, to be copied."""
    from rich.text import Text

    console.print(Text(text), soft_wrap=True)


def _codecs(plan: Plan) -> str:
    same = plan.codec == plan.reduction_codec
    return plan.codec if same else f"{plan.codec}, back {plan.reduction_codec}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 20 else f"{ratio:.2g} times"


def _time(seconds: float) -> str:
    if seconds < 1e-4:
        return "0 ms"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _bytes(count: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _speed(mbps: float | None) -> str:
    if mbps is None:
        return "none is enough"
    for scale, unit in ((1e3, "Gbit/s"), (1.0, "Mbit/s")):
        if mbps >= scale:
            return f"{mbps / scale:.3g} {unit}"
    return f"{mbps * 1e3:.3g} kbit/s"
