"""Commands of `murmur` in this process: what they print, and the line that refuses them."""

import click
from click.testing import CliRunner

from murmuration.protos.exit_codes import MurmurError


def printed(command: click.Command, *args: object) -> str:
    """All that it prints; it must end well."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def refused(command: click.Command, code: int, *args: object) -> str:
    """The one line that refuses these arguments; `murmur` must end with this exit code."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert isinstance(result.exception, MurmurError), result.output
    assert result.exception.exit_code == code
    assert "\n" not in str(result.exception)
    return str(result.exception)
