"""Failures that end a command with one line and a documented exit code."""

from typing import IO, Any

import click


class Failure(click.ClickException):
    """Ends the command: one line on stderr that names the cause and the fix, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"murmur: {self.message}", file=file, err=file is None)
