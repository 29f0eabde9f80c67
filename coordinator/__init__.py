"""The optional side of a swarm: workers started on one machine, introductions, and reports.

Nothing here is on the data path or imports torch; training goes on without any of it.

Workers say what they do in events (`protos.events`), which `worker.views` puts into words.
`rendezvous.records` keeps what is known of each worker. At the end `report.results` leaves what
`report.report` puts together and `report.printer` prints.

Two sources feed them. `launcher` plans worker processes and runs them to their end, on links of
`links`. `rendezvous.server` serves the Coordinator of the wire contract, as `rendezvous.registry`
decides. `report.status` asks any peer, and `report.terminal` shows what it knows, once or again and
again. `cli` holds the commands.
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
