"""Runs a command that dies with the process that started it, even when that one is SIGKILLed.

    python die_with_parent.py PARENT_PID CORES COMMAND [ARGUMENT...]

CORES is `all`, or those to keep to, such as `0,2`. Linux sends the signal; elsewhere the command
just runs. Code between fork and exec is not safe in Python, so this replaces itself.
"""

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    if cores != "all":
        with contextlib.suppress(OSError):  # taken from us since: any core will do
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it had died before the call
            os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job is born deaf to it
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
