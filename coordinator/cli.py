"""The commands `murmur coordinator`, `status`, `report` and `swarm`, which import late."""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from murmuration.coordinator.launch import Launch
from murmuration.protos.addresses import checked_address, is_loopback, served_at
from murmuration.worker.cli.options import options, web_option
from murmuration.worker.views import PagePlace
from murmuration.worker.views.lines import lasting

if TYPE_CHECKING:
    from rich.console import Console

    from murmuration.worker.identity.authority import Authority
    from murmuration.worker.identity.certificates import Identity

_PLAIN_WIDTH = 160
_PAGE_PORT = 8900


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:7600",
    show_default=True,
    metavar="HOST:PORT",
    help="Listen there.",
)
@click.option("--expect", type=click.IntRange(min=1), help="End when this many are done.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/coordinator"),
    show_default=True,
    help="Keep the run's key and this command's certificate here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines.")
@click.option("--insecure", is_flag=True, help="Encrypt nothing, and let anybody join.")
@click.option(*web_option.metadata["names"], **web_option.metadata["attributes"])
def coordinator(
    listen: str, expect: int | None, out: Path, as_json: bool, insecure: bool, web: str | None
) -> None:
    """Introduce workers to each other, let them in, and serve the page.

    It is optional: training goes on when it ends. A coordinator that is started again learns the
    swarm back. It ends on Ctrl-C or SIGTERM, or when --expect workers are done or have been silent
    for 30 s. Each worker reports on all (`murmur report`)."""
    host, _ = checked_address(listen)
    page = served_at(f"--web {web}", web, _PAGE_PORT)
    identity, authority = _identity_for(out, public=not is_loopback(host), insecure=insecure)
    import asyncio

    from murmuration.coordinator.rendezvous import CoordinatorRun

    if authority is not None and not as_json:
        click.echo(f"workers join with --token TOKEN, as `murmur token create {out}` gives it here")
    place = None if page is None else PagePlace(page, out)
    session = CoordinatorRun(as_json, expect, identity, authority, place, lambda i: i.save(out))
    asyncio.run(session.run(listen))


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print all that HOST:PORT says, as JSON.")
@click.option("--watch", "watches", is_flag=True, help="Ask all peers again and again.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Ask every so many seconds with --watch.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The folder of a worker of that run on this machine. An encrypted run answers only its "
    "members.",
)
def status(address: str, as_json: bool, watches: bool, every_s: float, run: Path | None) -> None:
    """Show a row for each peer that the worker or coordinator at HOST:PORT knows.

    Each peer is asked itself. With --watch they are asked until Ctrl-C or the end of the run.
    Without a terminal it then prints a line each time. With --json each line is a JSON object."""
    checked_address(address)
    from murmuration.coordinator.asking import AskedSwarm, ask
    from murmuration.coordinator.terminal import print_status, screen_for, watch
    from murmuration.worker.identity.certificates import member_identity

    identity = member_identity(run) if run is not None else None
    swarm = AskedSwarm(address, partial(ask, identity=identity))
    if watches:
        screen = None if as_json else screen_for(_console(), time.monotonic())
        watch(swarm.look, screen, every_s)
    elif as_json:
        click.echo(json.dumps(ask(address, identity=identity), indent=1, default=_plain))
    else:
        print_status(swarm.look(), _console())


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--picture/--no-picture", default=True, help="Draw loss.png too.", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Write the files in RUN, and print nothing.")
def report(run: Path, as_json: bool, picture: bool, quiet: bool) -> None:
    """Report on all peers of a run that has ended.

    RUN is the folder of `murmur swarm` or of one of the run's workers."""
    from murmuration.coordinator.report_files import report_of_folder

    found = report_of_folder(run, None if as_json or quiet else _console(), picture=picture)
    if as_json:
        click.echo(json.dumps(found, indent=1))


@click.command()
@options("typed", Launch)
@click.option("--json", "json_path", metavar="FILE", help="Write the report to FILE too.")
def swarm(typed: Launch, json_path: str | None) -> None:
    """Train on worker processes of this machine, and report.

    The workers are processes with sockets on loopback, or on links as slow as --link says. Ctrl-C
    saves, stops and still reports."""
    launch = Launch.of(typed)
    served_at(f"--web {launch.web}", launch.web, _PAGE_PORT)
    launch.check()
    from murmuration.coordinator.supervisor import run_swarm

    to_stdout = json_path == "-"
    path = Path(json_path) if json_path and not to_stdout else None
    console = _console(stderr=to_stdout)
    console.file = lasting(console.file)  # training goes on without readers
    code, report = run_swarm(launch, console, path)
    if to_stdout:
        click.echo(json.dumps(report, indent=1))
    sys.exit(code)


def _identity_for(
    out: Path, *, public: bool, insecure: bool
) -> "tuple[Identity | None, Authority | None]":
    """The coordinator's certificate and, if its run begins here, its key. Raises IdentityError."""
    from murmuration.worker.identity.authority import Authority
    from murmuration.worker.identity.certificates import Identity, IdentityError, Role

    if insecure:
        return None, None
    identity, authority = Identity.load(out), Authority.load(out)
    try:
        if authority is None and identity is None and public:
            authority = Authority.make(out)
        if authority is not None and identity is None:
            identity = authority.new_identity(Role.COORDINATOR, "coordinator")
            identity.save(out)
    except OSError as error:
        raise IdentityError(f"--out {out}: {error}; choose another folder") from error
    return identity, authority


def _console(*, stderr: bool = False) -> "Console":
    """As wide as the terminal; wide enough for every table where there is none."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(highlight=False, stderr=stderr, width=None if terminal else _PLAIN_WIDTH)


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    coordinator(prog_name="murmur coordinator")
