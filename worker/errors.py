"""The errors that are meant for a user: one line each, and an exit code of the command.

    MurmurError             1   murmuration.protos.exit_codes
        UsageError          2   an argument
        ConfigError         3   the TOML, --set or a flag
        TaskError           4   the task cannot be loaded as asked
            TextError       4   nor its text
        ManifestRefused     5   the swarm runs something else
        PeersUnreachable    6   nobody answers, or too few came
        CheckpointError     8   none can be used
        NotDialled          9   others cannot dial this peer
        IdentityError      10   murmuration.worker.identity: the run does not let this peer in
            NotValidNow    10   by this machine's clock
        TransportError      6   murmuration.worker.transport: bytes did not arrive
            Unreachable     6   the peer does not answer, or the link broke
                Untrusted   6   one side does not take the other's certificate
            Refused         6   a handler does not take what it was sent
                Busy        6   nor that much at once
            AddressInUse    7   this process cannot listen there

`murmuration` has all but the kinds of Unreachable and Refused. A message from a peer ends nothing,
whatever it holds: that is `murmuration.worker.wire.WireError`, which no user meets.
"""

from murmuration.protos.exit_codes import (
    ExitCode,
    MurmurError as MurmurError,
    UsageError as UsageError,
)


class ConfigError(MurmurError):
    """A setting cannot be used."""

    exit_code = ExitCode.CONFIGURATION


class TaskError(MurmurError, ValueError):
    """A task cannot be loaded as asked."""

    exit_code = ExitCode.TASK


class TextError(TaskError):
    """The text to learn from cannot be used."""


class ManifestRefused(MurmurError):
    """The swarm runs something else. Args: own: what this side has instead, by section."""

    exit_code = ExitCode.MANIFEST_REFUSED

    def __init__(self, message: str = "", own: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.own = own or {}


class PeersUnreachable(MurmurError):
    """Nobody answers, or too few came."""

    exit_code = ExitCode.UNREACHABLE


class CheckpointError(MurmurError):
    """No checkpoint can be used."""

    exit_code = ExitCode.CHECKPOINT


class NotDialled(MurmurError):
    """Others cannot dial this peer at the address that it advertises."""

    exit_code = ExitCode.NOT_DIALLED
