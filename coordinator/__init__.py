"""The optional side of a swarm: workers started on one machine, introductions, and reports.

Nothing here is on the data path or imports torch; training goes on without any of it.

    cli.py             the commands
    records.py         what is known of each worker, from its events (`protos.events`)
    report.py          the document on all workers at the end; printer.py is its text
    report_files.py    the files that a run leaves, and the report of its folder
    asking.py          asks any peer, and through it all that it knows
    terminal.py        shows what it knows, once or again and again

    launch.py          the options of `murmur swarm` as command lines of workers
    supervisor.py      runs them to their end; processes.py and die_with_parent.py are its children
    shaping_proxy.py   slow links of workers, made in a process of its own
    registry.py        introductions, as a state machine; rendezvous.py serves it
"""

from typing import IO, Any

import click


class Failure(click.ClickException):
    """Ends the command: one line on stderr that names the cause and the fix, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"murmur: {self.message}", file=file, err=file is None)
