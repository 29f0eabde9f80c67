"""`murmur`: finds the commands by entry point, and turns errors into one line and an exit code."""

import difflib
import errno
import io
import os
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import entry_points
from traceback import walk_tb

import click

from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.figures import is_utf8, shown
from murmuration.worker.errors import MurmurError, UsageError

_GROUP = "murmur.commands"
_NO_MEMORY = (
    "there is not enough memory; end something else, raise the limit (`ulimit -v`, or the "
    "container's), or take a smaller --model or task.batch_size"
)
# As torch says it of the main memory and of CUDA's, and the loader of a library.
_REFUSED_MEMORY = ("can't allocate memory", "out of memory", "failed to map segment", "bad_alloc")
_MAX_LINE = 2000  # characters of an error, of which a peer may have written a part


class _Commands(click.Group):
    """Loads a command's module only when it is used: `murmur status` needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({entry.name for entry in entry_points(group=_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        for entry in entry_points(group=_GROUP, name=cmd_name):
            command = entry.load()
            assert isinstance(command, click.Command)
            return command
        close = difflib.get_close_matches(cmd_name, self.list_commands(ctx), n=2, cutoff=0.5)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise click.UsageError(f"No such command '{cmd_name}'{hint}", ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="murmuration", prog_name="murmur")
def cli() -> None:
    """Train one model on machines joined only by ordinary internet links.

    \b
    Exit codes: 0 done; 1 failed; 2 usage; 3 configuration; 4 task or text; 5 the swarm runs
    something else; 6 peers unreachable; 7 address in use; 8 no usable checkpoint; 9 others cannot
    dial this peer; 10 not let in: a token or certificate; 130 interrupted after a save."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # an inherited stream whose place is not known
                stream.reconfigure(errors="replace")  # for ASCII terminals
    # gRPC's core writes what our own messages say already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # the disk is full: torch may import dill, which asks for it as well
        tempfile.tempdir = os.curdir
    try:
        if (strange := next((each for each in sys.argv if not is_utf8(each)), None)) is not None:
            raise UsageError(f"{strange}: it is not UTF-8, which peers tell names in; rename it")
        code = cli.main(prog_name="murmur", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(ExitCode.INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:  # what click says of an argument, in one line and in our form
        said = " ".join(error.format_message().split()).rstrip(".")
        said = said.replace(". Did you", "; did you").replace(". (Did you", " (did you")
        if isinstance(error, click.MissingParameter) and error.ctx:
            said += ", of " + " ".join(error.ctx.get_usage().split()[1:])
        within = [f.f_locals["ctx"] for f, _ in walk_tb(error.__traceback__) if "ctx" in f.f_locals]
        said = f"{said[:1].lower()}{said[1:]}{'' if said.endswith('?') else ';'}"
        click.echo(f"murmur: {said} see `{within[-1].command_path} --help`", err=True)
        sys.exit(ExitCode.USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except MurmurError as error:
        click.echo(f"murmur: {shown(' '.join(str(error).split()), _MAX_LINE)}", err=True)
        sys.exit(error.exit_code)
    except PermissionError as error:
        if error.filename is None:
            raise
        click.echo(f"murmur: {error.filename}: {error.strerror}; choose another folder", err=True)
        sys.exit(ExitCode.CONFIGURATION)
    except Exception as error:
        if not lacks_memory(error):
            raise
        click.echo(f"murmur: {_NO_MEMORY}", err=True)
        sys.exit(ExitCode.FAILED)


def lacks_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = isinstance(error, ImportError | RuntimeError)
    refused = told and any(each in str(error) for each in _REFUSED_MEMORY)
    return refused or isinstance(error, MemoryError)
