"""The exit codes of all commands, and the base of the errors that have one (`worker.errors`)."""

import signal
from enum import IntEnum
from signal import SIGINT, Signals


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
    NOT_DIALLED = 9
    NOT_ADMITTED = 10
    INTERRUPTED = 130


class MurmurError(Exception):
    """The message is one line for the user: what, where, how to fix."""

    exit_code: int = ExitCode.FAILED  # of the class, if an error says none of its own

    def __init__(self, message: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code


class UsageError(MurmurError):
    """An argument cannot be used."""

    exit_code = ExitCode.USAGE


def ending_signals() -> list[Signals]:
    """Those that ask this process to end. Windows has no SIGHUP, and nohup has it ignored."""
    named: list[Signals] = [getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]
    return [SIGINT, *(n for n in named if signal.getsignal(n) != signal.SIG_IGN)]


def exit_words(code: int) -> str:
    """An exit code in words: `killed (SIGKILL)`, `exit 4`."""
    if code == ExitCode.DONE:
        return "done"
    if code in (ExitCode.INTERRUPTED, -SIGINT):
        return "interrupted"
    if code < 0:
        named = {number.value: number.name for number in Signals}
        return f"killed ({named.get(-code, f'signal {-code}')})"
    return f"exit {code}"
