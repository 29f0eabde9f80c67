"""Reports how `murmur plan` finds a run's own plan and others: a document, and for people."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import torch

from murmuration.algorithms import utilization
from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.utilization import Workload
from murmuration.protos.figures import count, optional, percent, rate, ratio, seconds, size
from murmuration.worker.pipeline.part import Part, part_of
from murmuration.worker.tasks import Cursor
from murmuration.worker.training.kseed import seed_space_of
from murmuration.worker.training.mailbox import Mailbox
from murmuration.worker.views.summary import text_table

if TYPE_CHECKING:
    from murmuration.worker.config import Config

_SPEED_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


def run_workload(config: "Config", step_s: float | None, threads: int) -> Workload:
    """The run's own task, timed where no time is given. With `kseed` the coefficients travel.
    Raises as `task_of` and `part_of`."""
    from murmuration.worker.config import task_of

    task = task_of(config)
    part = part_of(task, config)
    parameters = {n: p.numel() for n, p in part.module.named_parameters() if p.requires_grad}
    if step_s is None:
        step_s = _timed_step_s(config, task, part, threads)
    workload, space = utilization.workload_of(parameters, step_s), seed_space_of(part.module)
    ddp = workload.ddp_parameters if space is None else space.elements
    return dataclasses.replace(workload, ddp_parameters=ddp)


def _timed_step_s(config: "Config", task: Any, part: Part, threads: int) -> float:
    replica = part.replica(task, config, Cursor(seed=config.run.seed, stream="plan"), Mailbox())
    numbers = itertools.count(1)

    def step() -> float:
        began_s, number = time.perf_counter(), next(numbers)
        replica.inner_step(number, replica.backward(number))
        return time.perf_counter() - began_s

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return median_s(step)
    finally:
        torch.set_num_threads(before)


def median_s(step: Callable[[], float]) -> float:
    """The median seconds of 3 to 100 steps, until it was a second; the first one warms up."""
    step()
    took_s: list[float] = []
    while len(took_s) < 100 and (len(took_s) < 3 or sum(took_s) < 1):
        took_s.append(step())
    return statistics.median(took_s)


def found_for(
    link: Link,
    workload: Workload,
    peers: int,
    own: Plan,
    plans: Mapping[str, Sequence[Plan]],
    target: float,
) -> dict[str, Any]:
    """The own plan on a link, the speeds that it needs, proposals. Raises ValueError: a misfit."""
    place = workload, link, peers
    prediction, proposals = utilization.predict(own, *place), []
    for preset, plan, expected in utilization.propose(target, plans, *place):
        ddp = plan.payload == "gradient"  # a step is a round of it by itself
        period = () if ddp else ("--set", f"diloco.inner_steps={plan.inner_steps}")
        proposals.append(
            {
                "arguments": ["--preset", preset, *period],  # to add to `murmur up`
                "plan": dataclasses.asdict(plan),
                "bits_per_parameter": utilization.bits_per_parameter(plan),
                "prediction": dataclasses.asdict(expected),
            }
        )
    least = None if proposals else utilization.least_mbps(target, plans, *place)
    return {
        "link": str(link),
        "prediction": dataclasses.asdict(prediction),
        "needed_mbps": {str(s): utilization.needed_mbps(own, *place, s) for s in _SPEED_TARGETS},
        "proposals": proposals,
        "needed_for_any_proposal_mbps": least,
    }


def print_report(report: Mapping[str, Any], work: Workload) -> None:
    outside = f" ({work.outside:,} of them outside the layers)" if work.outside else ""
    model = f"{count(len(work.layers), 'layer')}, {work.parameters:,} parameters{outside}"
    if work.ddp_parameters is not None:
        model = f"{work.parameters:,} coefficients for {work.ddp_parameters:,} parameters"
    source = report["step_source"]
    click.echo(f"{report['task']}: {model}; {seconds(work.step_s)} a step, {source}")
    for found in report["links"]:
        click.secho(f"\n{report['peers']} peers, each on {found['link']}", bold=True)
        for label, text in _own(report, work, found).items():
            click.echo(f"  {label:<13} {text}")
        if not found["proposals"]:
            least, target = found["needed_for_any_proposal_mbps"], percent(report["target"])
            more = f"; it takes {_speed(least)}, or a lower --target"
            if least is None:
                more = ", nor on any with its delay; lower --target"
            most = utilization.PERIODS[-1]
            click.echo(f"  no H up to {most} reaches {target} on this link{more}")
            continue
        heads = ("H", "fragments", "tau", "bits", "utilization", "waiting", "sent/step", "DDP/it")
        table = text_table(
            (f"for {percent(report['target'])}", *heads, "codec"),
            [(str(rank), *_cells(work, each)) for rank, each in enumerate(found["proposals"], 1)],
            align="<>>>>>>>><",
        )
        click.echo(table)
        for rank, proposal in enumerate(found["proposals"], 1):
            click.echo(f"  {rank}  {' '.join(proposal['arguments'])}")
        if found["proposals"][0]["plan"]["payload"] == "gradient":
            click.echo("  This link carries the gradients of every step: nothing is lost with ddp.")


def _own(report: Mapping[str, Any], work: Workload, found: Mapping[str, Any]) -> dict[str, str]:
    told, own = found["prediction"], report["plan"]
    overlap, fragments = own["overlap_steps"], count(_fragments(work, own), "fragment")
    waiting, period = seconds(told["stall_s_per_period"]), seconds(told["period_s"])
    lines = {
        "this run": f"{report['preset']}: H {own['inner_steps']}, {fragments}, tau {overlap}, "
        f"{_codecs(own)}",
        "utilization": f"{percent(told['utilization'])}; {waiting} waiting in a period of {period}",
    }
    if told["ddp_ratio"] is None:
        return lines | {"sent": "nothing"}
    given, peak = count(max(1, overlap), "step"), ratio(told["peak_link_share"])
    speeds = (f"{percent(float(s))}: {_speed(mbps)}" for s, mbps in found["needed_mbps"].items())
    return lines | {
        "sent": f"{size(told['bytes_per_step'])} per worker and step, "
        f"{size(told['bytes_per_sync'])} per sync of all parameters; as much is received",
        "bf16 DDP": f"would send {ratio(told['ddp_ratio'])} as much",
        "link": f"busy {percent(told['link_share'])} of the time; what is sent at once takes "
        f"{peak} the {given} it has",
        "speed needed": ", ".join(speeds),
    }


def _cells(work: Workload, proposal: Mapping[str, Any]) -> tuple[str, ...]:
    plan, told = proposal["plan"], proposal["prediction"]
    return (
        str(plan["inner_steps"]),
        str(_fragments(work, plan)),
        str(plan["overlap_steps"]),
        f"{proposal['bits_per_parameter']:.3g}",
        percent(told["utilization"]),
        f"{seconds(told['stall_s_per_period'])} of {seconds(told['period_s'])}",
        size(told["bytes_per_step"]),
        optional(told["ddp_ratio"], lambda times: f"{times:,.1f}"),
        _codecs(plan),
    )


def _fragments(work: Workload, plan: Mapping[str, Any]) -> int:
    return len(work.fragments(plan["fragments"], plan["pattern"]))


def _codecs(plan: Mapping[str, Any]) -> str:
    there, back = plan["codec"], plan["reduction_codec"]
    return there if there == back else f"{there}, back {back}"


def _speed(mbps: float | None) -> str:
    return "none is enough" if mbps is None else rate(mbps)
