"""What ends a worker, in one line and with an exit code of its own.

    MurmurError
        UsageError          2   an argument
        ConfigError         3   the TOML, --set or a flag
        ManifestRefused     5   the swarm runs something else
        PeersUnreachable    6   nobody answers, or too few came
        CheckpointError     8   none can be used

Two more live elsewhere: `worker.tasks.TaskError`, 4; `worker.transport.AddressInUse`, 7.
A message from a peer ends nothing, whatever it holds: that is `worker.wire.WireError`.
"""

from typing import ClassVar

EXIT_USAGE = 2
EXIT_CONFIG = 3
EXIT_TASK = 4
EXIT_MANIFEST = 5
EXIT_UNREACHABLE = 6
EXIT_ADDRESS = 7
EXIT_CHECKPOINT = 8
EXIT_INTERRUPTED = 130


class MurmurError(Exception):
    """The message is one line for the user: what, where, how to fix."""

    exit_code: ClassVar[int] = 1


class UsageError(MurmurError):
    exit_code = EXIT_USAGE


class ConfigError(MurmurError):
    exit_code = EXIT_CONFIG


class ManifestRefused(MurmurError):
    exit_code = EXIT_MANIFEST


class PeersUnreachable(MurmurError):
    exit_code = EXIT_UNREACHABLE


class CheckpointError(MurmurError):
    exit_code = EXIT_CHECKPOINT
