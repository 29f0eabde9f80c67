"""Views of a run for a person: words, a table, a page in a browser. Nothing here imports torch.

lines.py       events as lines
summary.py     each peer in short, and all of them: the table and the figures of every view
history.py     what the peers have said so far, within bounds
page.py        a web server, and the page; slow to import, so that only a caller that serves does
tracking.py    figures for TensorBoard and others
static/        the page in a browser; uPlot, which draws its curves, is Leon Sorokin's (MIT)
"""

from dataclasses import dataclass
from pathlib import Path

ANSWER_S, ASKED_AT_ONCE = 1.5, 16  # for the status of one peer, and of how many


@dataclass(frozen=True)
class PagePlace:
    """HOST:PORT to serve the page at, port 0 a free one; the folder with token and certificate."""

    address: str
    folder: Path
