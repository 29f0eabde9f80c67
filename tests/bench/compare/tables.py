"""The comparison as tables: for the terminal, and as Markdown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from algorithms.link import Link
from protos.figures import count, optional, parameters, percent, relative, seconds, size
from protos.tables import markdown_table, text_table
from tests.bench.compare.rows import Row

HEADS = (
    "",
    "wall time",
    "compute utilization",
    "tokens/s of local",
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
        optional(row.wall_s, lambda value: about + seconds(value)),
        optional(row.compute_utilization, lambda value: about + percent(value, 1)),
        optional(row.relative_speed, lambda value: about + relative(value)),
        optional(row.stall_per_round_s, seconds),
        optional(row.sent_per_step_bytes, size),
        optional(row.bits_per_parameter, lambda value: f"{value:.2f}"),
        optional(row.val_loss, lambda value: f"{value:.3f}"),
    )


def plain_table(table: LinkTable) -> str:
    """For the terminal; `notes` go below it."""
    rows = [cells(row) for row in table.rows]
    return text_table(HEADS, rows, title=table.title, head_width=13)


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
    return markdown_table(heads, rows, align="<" + ">" * len(HEADS[1:]) + "<" * noted)


def _periods(rows: Sequence[Row]) -> str:
    """`a round every 20 steps`, or which one has which."""
    periods = {row.name: row.inner_steps for row in rows if row.inner_steps and row.inner_steps > 1}
    different = sorted(set(periods.values()))
    if len(different) == 1:
        return f"a round every {count(different[0], 'step')}"
    each = ", ".join(f"{name} {period}" for name, period in periods.items())
    return f"steps between rounds: {each}"
