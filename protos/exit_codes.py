"""The exit codes of every command and worker, as docs/commands.md lists them."""

from enum import IntEnum


class ExitCode(IntEnum):
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
