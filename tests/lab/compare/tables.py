"""A run's report as a row, and the comparison as tables: for the terminal, and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.protos.events import float_of, int_of, printable, text_of
from murmuration.protos.figures import count, optional, parameters, percent, seconds, size
from murmuration.worker.views.summary import text_table
from tests.lab.compare.budget import Measured, wall_of
from tests.lab.compare.options import LOCAL

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run; None is what was not measured.

    Args:
        name: the preset or the system.
        title: how a system calls itself; None for presets.
        steps: done; `asked_steps` those asked for. Where they differ, wall_s and what follows from
            it are extrapolated, and there is no loss: it would belong to another schedule.
        wall_s: from the first inner step to the last.
        step_s: of forward, backward and inner step alone; tells how busy the machine was.
        compute_utilization: share of wall_s in forward, backward and inner step.
        relative_speed: tokens per second, against `local` on the same link.
        stall_per_round_s: pauses of the training.
        sent_per_step_bytes: of one worker, everything that it sends: whole Ethernet frames where
            the link has counted them, as other systems' reports have it, else what it gave to TCP.
        bits_per_parameter: what travelled of each value sent, after compression.
        problem: why there are no figures.
        remarks: what one has to know about the figures.
    """

    name: str
    asked_steps: int
    title: str | None = None
    steps: int | None = None
    inner_steps: int | None = None
    wall_s: float | None = None
    step_s: float | None = None
    compute_utilization: float | None = None
    relative_speed: float | None = None
    stall_per_round_s: float | None = None
    sent_per_step_bytes: float | None = None
    bits_per_parameter: float | None = None
    val_loss: float | None = None
    rounds: int | None = None
    problem: str | None = None
    failed: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def extrapolated(self) -> bool:
        return self.steps is not None and self.steps != self.asked_steps

    @property
    def notes(self) -> tuple[str, ...]:
        """All that is to be said of the row in words."""
        notes = [self.problem] if self.problem else []
        if self.extrapolated:
            notes.append(f"{self.steps:,} of {count(self.asked_steps, 'step')}")
        return (*notes, *self.remarks)


def speed_of(report: Report) -> float | None:
    """Inner steps a second."""
    steps, wall_s = int_of(report, "steps"), float_of(report, "wall_s")
    return steps / wall_s if steps and wall_s else None


def row_of(name: str, asked_steps: int, report: Report, local_speed: float | None) -> Row:
    """Of a run that came to its end.

    Args:
        asked_steps: of the whole run, of which the report may be a shorter one.
        report: that of `murmur swarm` or of `tests/lab/peers`; any key may be missing or None.
        local_speed: inner steps a second of `local`.
    """
    steps, rounds = int_of(report, "steps"), int_of(report, "rounds_completed") or 0
    wall_s, compute_s = float_of(report, "wall_s"), float_of(report, "compute_s")
    stall_s, inner_steps = float_of(report, "stall_s"), int_of(report, "inner_steps")
    rounds -= int_of(report, "final_mean_rounds") or 0  # it comes after the last step
    if stall_s is not None:
        stall_s -= float_of(report, "final_mean_stall_s") or 0.0
    if steps and wall_s is not None:
        wall_s = wall_of(
            Measured(
                steps=steps,
                wall_s=wall_s,
                compute_s=compute_s or 0.0,
                stall_s=stall_s or 0.0,
                rounds=rounds,
                inner_steps=inner_steps or 1,
            ),
            asked_steps,
        )
    utilization = speed = None
    if steps and wall_s:
        if compute_s is not None:
            utilization = compute_s * asked_steps / steps / wall_s
        speed = asked_steps / wall_s / local_speed if local_speed else None
    sent = _sent_bytes(report)
    return Row(
        name=name,
        title=text_of(report, "system"),
        asked_steps=asked_steps,
        steps=steps,
        inner_steps=inner_steps if rounds else None,
        wall_s=wall_s,
        step_s=compute_s / steps if steps and compute_s is not None else None,
        compute_utilization=utilization,
        relative_speed=speed,
        stall_per_round_s=stall_s / rounds if rounds and stall_s is not None else None,
        sent_per_step_bytes=sent / steps if steps and sent is not None and rounds else None,
        bits_per_parameter=_bits(report.get("bits_per_value")),
        val_loss=float_of(report, "val_loss") if steps == asked_steps else None,
        rounds=rounds,
        remarks=_remarks(name, report),
    )


def problem_row(name: str, asked_steps: int, problem: str, *, failed: bool = False) -> Row:
    """Of a run that has no figures. Args: failed: it was tried."""
    line = " ".join(printable(problem).split())
    return Row(name=name, asked_steps=asked_steps, problem=line, failed=failed)


def _sent_bytes(report: Report) -> float | None:
    """Mean over the workers."""
    link_bytes, means = report.get("link_bytes"), text_of(report, "link_means") or ""
    if isinstance(link_bytes, Mapping) and "namespaces" in means:
        counted = [
            sent
            for counters in link_bytes.values()
            if isinstance(counters, Mapping)
            and (sent := float_of(counters, "sent_bytes")) is not None
        ]
        if counted:
            return sum(counted) / len(counted)
    return float_of(report, "bytes_sent_per_worker")


def _bits(bits_per_value: object) -> float | None:
    """Of what the rounds send both ways, weighted by how many values each way carried."""
    if not isinstance(bits_per_value, Mapping):
        return None
    bits = values = 0.0
    for kind, part in bits_per_value.items():
        if kind == "final_mean" or not isinstance(part, Mapping):
            continue
        travelled = float_of(part, "bits_travelled")
        payload_bytes = float_of(part, "payload_bytes")
        if travelled and payload_bytes:
            bits += 8 * payload_bytes
            values += 8 * payload_bytes / travelled
    return bits / values if values else None


def _remarks(name: str, report: Report) -> tuple[str, ...]:
    """What went less well than the figures look."""
    remarks = []
    rounds = int_of(report, "rounds_completed") or 0
    if partial := int_of(report, "rounds_partial"):
        remarks.append(f"{partial} of {count(rounds, 'round')} averaged without everybody's part")
    if failed := int_of(report, "rounds_failed"):
        remarks.append(f"{count(failed, 'failed round')}, over all workers")
    peers = [peer for peer in report.get("peers") or () if isinstance(peer, Mapping)]
    if lost := sum(1 for peer in peers if peer.get("exit_code")):
        remarks.append(f"{count(lost, 'worker')} did not come to the end")
    # Systems that average to rounding differ by rounding; only a difference that shows counts.
    spread = float_of(report, "val_loss_spread")
    if report.get("hashes_agree") is False and name != LOCAL and (spread is None or spread > 1e-3):
        remarks.append("replicas differ")
    return tuple(remarks)


HEADS = (
    "",
    "speed beside local",
    "wall time",
    "compute utilization",
    "stall per round",
    "sent per worker and step",
    "bits per parameter",
    "validation loss",
)


@dataclass
class LinkTable:
    """The runs on one link.

    Args:
        text: the link as it was typed, as in the folders' names.
        means: how it was made slow; None before a run has told.
    """

    link: Link
    text: str
    rows: list[Row] = field(default_factory=list)
    means: str | None = None

    @property
    def title(self) -> str:
        """`20 Mbit/s, 50 ms of delay`."""
        link = self.link
        parts = [f"{link.rate_mbps:,g} Mbit/s"]
        for name, time_s in (("delay", link.delay_s), ("jitter", link.jitter_s)):
            parts += [f"{time_s * 1e3:g} ms of {name}"] if time_s else []
        parts += [f"{link.loss:g} broken connections a minute"] if link.loss else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which all runs were done, for the caption; None is not known."""

    workers: int
    steps: int
    seed: int
    cores: int
    settings: tuple[str, ...] = ()
    params: int | None = None


def cells(row: Row) -> tuple[str, ...]:
    """One per head."""
    about = "~" if row.extrapolated else ""
    return (
        row.title or row.name,
        optional(row.relative_speed, lambda value: about + relative(value)),
        optional(row.wall_s, lambda value: about + seconds(value)),
        optional(row.compute_utilization, lambda value: about + percent(value, 1)),
        optional(row.stall_per_round_s, seconds),
        optional(row.sent_per_step_bytes, size),
        optional(row.bits_per_parameter, lambda value: f"{value:.2f}"),
        optional(row.val_loss, lambda value: f"{value:.3f}"),
    )


def plain_table(table: LinkTable) -> str:
    """For the terminal; `notes` go below it."""
    heads, rows = [fill(head, 13) for head in HEADS], [cells(row) for row in table.rows]
    return f"{table.title}\n{text_table(heads, rows)}"


def notes(table: LinkTable) -> list[str]:
    """A line for each row of which there is something to be said."""
    return [f"{row.name}: {'; '.join(row.notes)}" for row in table.rows if row.notes]


def markdown(tables: Sequence[LinkTable], conditions: Conditions) -> str:
    """All tables, and a caption."""
    blocks = [_markdown_table(table) for table in tables if table.rows]
    return "\n\n".join([*blocks, caption(tables, conditions)]) + "\n"


def caption(tables: Sequence[LinkTable], conditions: Conditions) -> str:
    """What all rows have in common, in a line or two."""
    rows = [row for table in tables for row in table.rows]
    parts = [
        count(conditions.workers, "worker"),
        count(conditions.steps, "inner step"),
        *([_periods(rows)] if any((row.inner_steps or 1) > 1 for row in rows) else []),
        *([f"a model of {parameters(conditions.params)}"] if conditions.params else []),
        *conditions.settings,
        f"seed {conditions.seed}",
        f"{count(conditions.cores, 'core')} shared by all workers, one thread each",
    ]
    if means := sorted({table.means for table in tables if table.means}):
        parts.append(f"links by {' and '.join(means)}")
    text = ", ".join(parts) + "."
    if any(row.extrapolated for row in rows):
        text += (
            " ~: extrapolated from a run of fewer steps, which has no comparable validation loss."
        )
    return text[0].upper() + text[1:]


def as_json(tables: Sequence[LinkTable], conditions: Conditions) -> dict[str, Any]:
    """Every figure, not rounded."""
    return {
        **asdict(conditions),
        "links": [
            {
                "link": table.text,
                "link_means": table.means,
                "rows": [{**asdict(row), "extrapolated": row.extrapolated} for row in table.rows],
            }
            for table in tables
        ],
    }


def _markdown_table(table: LinkTable) -> str:
    noted = any(row.notes for row in table.rows)
    rows = []
    for row in table.rows:
        name, *figures = cells(row)
        name = f"`{name}`" if row.title is None else name
        rows.append([name, *figures, *(["; ".join(row.notes)] if noted else [])])
    heads = [table.title, *HEADS[1:], *(["note"] if noted else [])]
    marks = ["---", *["---:"] * len(HEADS[1:]), *(["---"] if noted else [])]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (heads, marks, *rows)
    )


def _periods(rows: Sequence[Row]) -> str:
    """`a round every 20 steps`, or which one has which."""
    periods = {row.name: row.inner_steps for row in rows if row.inner_steps and row.inner_steps > 1}
    different = sorted(set(periods.values()))
    if len(different) == 1:
        return f"a round every {count(different[0], 'step')}"
    each = ", ".join(f"{name} {period}" for name, period in periods.items())
    return f"steps between rounds: {each}"


def relative(number: float) -> str:
    """Of a whole: `53 %`, `1.2 %`, `100 %`."""
    return f"{100 * number:.0f} %" if number >= 0.0995 else f"{100 * number:.2g} %"
