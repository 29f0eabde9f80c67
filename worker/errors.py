"""What ends a worker, in one line and with an exit code of its own.

    MurmurError
        UsageError          2   an argument
        ConfigError         3   the TOML, --set or a flag
        ManifestRefused     5   the swarm runs something else
        PeersUnreachable    6   nobody answers, or too few came
        CheckpointError     8   none can be used
        NotDialled          9   others cannot dial this peer

Three more live elsewhere: `worker.tasks.TaskError`, 4; `worker.transport.AddressInUse`, 7;
`protos.identity.IdentityError`, 10.
A message from a peer ends nothing, whatever it holds: that is `worker.wire.WireError`.
"""

from typing import ClassVar

from protos.exit_codes import ExitCode


class MurmurError(Exception):
    """The message is one line for the user: what, where, how to fix."""

    exit_code: ClassVar[int] = ExitCode.FAILED


class UsageError(MurmurError):
    """An argument cannot be used."""

    exit_code = ExitCode.USAGE


class ConfigError(MurmurError):
    """A setting cannot be used."""

    exit_code = ExitCode.CONFIGURATION


class ManifestRefused(MurmurError):
    """The swarm runs something else."""

    exit_code = ExitCode.MANIFEST_REFUSED


class PeersUnreachable(MurmurError):
    """Nobody answers, or too few came."""

    exit_code = ExitCode.UNREACHABLE


class CheckpointError(MurmurError):
    """No checkpoint can be used."""

    exit_code = ExitCode.CHECKPOINT


class NotDialled(MurmurError):
    """Others cannot dial this peer at the address that it advertises."""

    exit_code = ExitCode.NOT_DIALLED
