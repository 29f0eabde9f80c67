"""Tables as text: aligned for a terminal, and as Markdown."""

import textwrap
from collections.abc import Sequence

_GAP = "   "


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str | None = None,
    title: str = "",
    head_width: int | None = None,
) -> str:
    """Columns in line, a rule below the heads, an empty line above and below.

    Args:
        heads: one for each column.
        rows: as many cells in each.
        align: `<` or `>` for each column; by default the first is to the left, the others right.
        title: above all, if any.
        head_width: characters that heads are broken into lines at, between words.
    """
    align = "<" + ">" * (len(heads) - 1) if align is None else align
    broken = [textwrap.wrap(head, head_width) if head_width else [head] for head in heads]
    depth = max(map(len, broken))
    # Heads stand on the rule.
    above = [[""] * (depth - len(lines)) + lines for lines in broken]
    head_rows = [list(cells) for cells in zip(*above, strict=True)]
    everything = [*head_rows, *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, align, widths, strict=True)
        return ("  " + _GAP.join(f"{cell:{side}{width}}" for cell, side, width in columns)).rstrip()

    rule = " " + "─" * (sum(widths) + len(_GAP) * (len(widths) - 1) + 2)
    lines = ["", *map(line, head_rows), rule, *map(line, rows), ""]
    return "\n".join([title, *lines] if title else lines)
