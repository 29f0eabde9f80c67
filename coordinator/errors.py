"""Failures that end a command with one line and a documented exit code."""

from enum import IntEnum
from typing import IO, Any

import click


class Exit(IntEnum):
    """Exit codes, the same for every command and worker."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CONFIGURATION = 3
    TASK = 4
    MANIFEST_REFUSED = 5
    UNREACHABLE = 6
    ADDRESS_IN_USE = 7
    CHECKPOINT = 8
    INTERRUPTED = 130


class Failure(click.ClickException):
    """Ends the command: one line on stderr that names the cause and the fix, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"murmur: {self.message}", file=file, err=file is None)
