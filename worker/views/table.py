"""Tables for a terminal, and the same as text."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STATES = ("state", "end")  # columns
_WRAPPED = ("stage", "not taken")
_WIDEST = 10_000


def drawn_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], align: str, title: str = "", **more: Any
) -> Table:
    """Columns below a rule; states have colours.

    Args:
        align: `<` or `>` for each column.
        more: of rich's table.
    """
    drawn = Table(
        box=box.SIMPLE_HEAD,
        title=Text(title) if title else None,
        title_justify="left",
        title_style="dim",
        **more,
    )
    for head, side in zip(heads, align, strict=True):
        justify: Any = "left" if side == "<" else "right"
        drawn.add_column(Text(head), justify=justify, no_wrap=head not in _WRAPPED)
    for row in rows:
        cells = zip(heads, row, strict=True)
        drawn.add_row(*(Text(c, style=_style(c) if h in _STATES else "") for h, c in cells))
    return drawn


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str | None = None,
    title: str = "",
    head_width: int | None = None,
) -> str:
    """The same as text, as wide as it takes.

    Args:
        align: by default the first column is to the left, the others right.
        head_width: characters that heads are broken into lines at, between words.
    """
    broken = [textwrap.fill(head, head_width) if head_width else head for head in heads]
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None)
    with console.capture() as said:
        console.print(drawn_table(broken, rows, align or "<" + ">" * (len(heads) - 1), title))
    return "\n".join(line.rstrip() for line in said.get().splitlines())


def _style(state: str) -> str:
    if state in ("training", "done"):
        return "green"
    bad = state.startswith(("dead", "lost", "killed", "exit", "silent"))
    return "red" if bad else "yellow"
