"""A comparison: one run after the other, then its tables and files."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from murmuration.algorithms.link import Link
from murmuration.coordinator import Failure
from murmuration.coordinator.launch import core_count
from murmuration.coordinator.processes import Interrupts
from murmuration.protos.events import int_of
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.figures import count, duration
from murmuration.protos.files import write_atomically
from tests.lab.compare import runs
from tests.lab.compare.budget import Cost, cost_of, steps_within
from tests.lab.compare.options import LOCAL, Bench
from tests.lab.compare.runs import Ended
from tests.lab.compare.tables import (
    Conditions,
    LinkTable,
    Row,
    as_json,
    caption,
    markdown,
    notes,
    plain_table,
    problem_row,
    row_of,
    speed_of,
)

_BAD_INPUT = (ExitCode.USAGE, ExitCode.CONFIGURATION, ExitCode.TASK)


class Session:
    """Runs everything and keeps what came of it; `tables` grow row by row. Main thread only.

    Args:
        interrupts: entered; ends the comparison between two runs. Runs heed signals themselves.
        say: shows a piece of a line; each line is begun when a run starts and finished by its end.
        done: takes the row of each run at its end.
    """

    def __init__(
        self,
        bench: Bench,
        interrupts: Interrupts,
        say: Callable[[str], None],
        done: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self._bench, self._interrupts, self._say, self._done = bench, interrupts, say, done
        self.tables: list[LinkTable] = []
        self._params: int | None = None
        self._speed: float | None = None  # of the last `local`, inner steps a second
        self._speed_here: float | None = None  # the same, if it was on the link in hand

    @property
    def conditions(self) -> Conditions:
        bench = self._bench
        return Conditions(
            workers=bench.workers,
            steps=bench.steps,
            seed=bench.seed,
            cores=core_count(),
            settings=bench.settings,
            params=self._params,
        )

    def run(self) -> int:
        """Returns the exit code: 0, 1 where a run has failed, 128 + the signal that came.

        Raises:
            Failure: a setting that no worker takes; what was measured before stays in `tables`.
        """
        for text, link in zip(self._bench.links, self._bench.parsed_links(), strict=True):
            table = LinkTable(link, text)
            self.tables.append(table)
            self._speed_here = None
            self._say(f"{table.title}\n")
            for name in (*self._bench.order, *self._bench.systems):
                ended = self._one(table, name)
                if ended.interrupted:
                    return ended.exit_code
                if self._interrupts.first is not None:
                    return 128 + self._interrupts.first
        failed = any(row.failed for table in self.tables for row in table.rows)
        return ExitCode.FAILED if failed else ExitCode.DONE

    # --------------------------------------------------------------------------------- inside

    def _one(self, table: LinkTable, name: str) -> Ended:
        """Raises Failure."""
        bench, theirs = self._bench, name in self._bench.systems
        steps = self._steps(name, table.link, whole=theirs)
        skipped = runs.why_skipped(name, bench, table.link, steps) if theirs else None
        if skipped:
            self._add(table, problem_row(name, bench.steps, skipped))
            self._say(f"  {name:<10} {skipped}\n")
            return Ended()
        self._say(f"  {name:<10} {self._expected(name, table.link, steps)} ... ")
        began_s = time.monotonic()
        if theirs:
            folder, inner = bench.folder(name, table.text), bench.period_steps(name)
            ended = runs.train_baseline(name, bench, table.link, folder, steps, inner)
        else:
            ended = runs.train_ours(bench.launch(name, table.text, steps), bench.link_means)
        elapsed = duration(time.monotonic() - began_s)
        self._say(f"{ended.problem or 'done'}, after {elapsed} with its start\n")
        self._add(table, self._row(table, name, ended, ours=not theirs))
        return ended

    def _add(self, table: LinkTable, row: Row) -> None:
        table.rows.append(row)
        self._done(row)

    def _row(self, table: LinkTable, name: str, ended: Ended, *, ours: bool) -> Row:
        """Raises Failure."""
        if ended.report is None:
            problem = ended.problem or "failed"
            if ours and ended.exit_code in _BAD_INPUT:
                raise Failure(f"preset {name}: {problem}", ended.exit_code)
            return problem_row(name, self._bench.steps, problem, failed=not ended.interrupted)
        if ours:
            table.means = table.means or ended.report.get("link_means")
        if name == LOCAL:
            self._params = int_of(ended.report, "params") or self._params
            self._speed_here = speed_of(ended.report)
            self._speed = self._speed_here or self._speed
        return row_of(name, self._bench.steps, ended.report, self._speed_here)

    def _steps(self, name: str, link: Link, *, whole: bool) -> int:
        """How many steps to do; with `whole` those of whole rounds, 0 if there is none."""
        bench = self._bench
        steps, period = bench.steps, bench.period_steps(name)
        if self._speed is not None and self._params is not None and name != LOCAL:
            steps = steps_within(bench.limit_s, steps, self._cost(name, link, 1 / self._speed))
        return steps - steps % period if whole else steps

    def _cost(self, name: str, link: Link, step_s: float) -> Cost:
        assert self._params is not None
        return cost_of(
            name,
            params=self._params,
            workers=self._bench.workers,
            inner_steps=self._bench.period_steps(name),
            step_s=step_s,
            link=link,
        )

    def _expected(self, name: str, link: Link, steps: int) -> str:
        """`60 of 400 steps, about 4 min 10 s`."""
        text = count(steps, "step")
        if steps != self._bench.steps:
            text = f"{steps:,} of {count(self._bench.steps, 'step')}"
        if self._speed is None:
            return text
        step_s = 1 / self._speed
        about_s = steps * step_s
        if name != LOCAL and self._params is not None:
            about_s = self._cost(name, link, step_s).run_s(steps)
        return f"{text}, about {duration(about_s)}"


_PLAIN_WIDTH = 160


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
            _write(path, content.encode())


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


def _write(path: Path, content: bytes) -> None:
    """Says where it is, or why it is not there."""
    try:
        write_atomically(path, content)
    except OSError as error:
        click.echo(f"warning: {path} could not be written: {error.strerror or error}", err=True)
    else:
        click.echo(str(path))


def _say(text: str) -> None:
    click.echo(text, nl=False, err=True)
