"""Runs a comparison, and leaves what came of it: tables, files and the figure."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from algorithms.link import Link
from coordinator import Failure
from coordinator.launcher.processes import Interrupts
from coordinator.report.report import write_atomically
from tests.bench.compare.asked import Bench
from tests.bench.compare.session import Session
from tests.bench.compare.tables import LinkTable, as_json, caption, markdown, notes, plain_table

_PLAIN_WIDTH = 160
_FIGURE_MBPS = 20.0


def run_bench(
    bench: Bench, json_path: Path | None = None, markdown_path: Path | None = None
) -> int:
    """Runs everything and leaves the results; returns the exit code. Main thread only.

    The tables go to stdout, progress to stderr. What cannot be written is said.

    Raises:
        Failure: a setting that no worker takes, after what was measured before was shown.
    """
    failure: Failure | None = None
    with Interrupts() as interrupts:  # to the end: more of them must not cost the tables
        session = Session(bench, interrupts, _say)
        try:
            code = session.run()
        except Failure as error:
            failure, code = error, error.exit_code
        if any(table.rows for table in session.tables):
            _leave(bench, session, json_path, markdown_path)
    if failure is not None:
        raise failure
    return code


def _leave(
    bench: Bench, session: Session, json_path: Path | None, markdown_path: Path | None
) -> None:
    tables, conditions = [table for table in session.tables if table.rows], session.conditions
    _print(tables, caption(tables, conditions))
    document = json.dumps(as_json(tables, conditions), indent=1, allow_nan=False) + "\n"
    text = markdown(tables, conditions)
    for path, content in (
        (bench.out / "bench.json", document),
        (json_path, document),
        (bench.out / "bench.md", text),
        (markdown_path, text),
    ):
        if path is not None:
            _write(path, partial(write_atomically, content=content.encode()))
    _write(bench.out / "bench.png", partial(_draw, bench=bench, tables=tables))


def _print(tables: Sequence[LinkTable], words: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    for table in tables:
        console.print()
        console.print(Text(plain_table(table)), soft_wrap=True)
        for line in notes(table):
            console.print(Text(f"  {line}"))
    console.print()
    console.print(Text(words))


def _write(path: Path, write: Callable[[Path], bool | None]) -> None:
    """Says where it is, or why it is not there; False from `write`: there is nothing to write."""
    try:
        written = write(path)
    except OSError as error:
        click.echo(f"warning: {path} could not be written: {error.strerror or error}", err=True)
        return
    if written is not False:
        click.echo(str(path))


def _draw(path: Path, bench: Bench, tables: Sequence[LinkTable]) -> bool:
    """Of the link of 20 Mbit/s, or else the first; whether there was something to draw."""
    from tests.bench.compare.picture import DRAWN, draw_link_use
    from tests.bench.compare.series import read_events, series_of

    plain = (table for table in tables if table.link == Link(rate_mbps=_FIGURE_MBPS))
    table = next(plain, tables[0])
    runs, whole_s = {}, {}
    for row in table.rows:
        if row.name not in DRAWN or row.problem is not None:
            continue
        files = sorted(bench.folder(row.name, table.text).glob("*/events.jsonl"))
        if series := series_of([read_events(path) for path in files]):
            runs[row.name], whole_s[row.name] = series, row.wall_s
    if not runs:
        return False
    draw_link_use(path, runs, table.link, whole_s)
    return True


def _say(text: str) -> None:
    click.echo(text, nl=False, err=True)
