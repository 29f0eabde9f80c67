"""The commands `murmur coordinator`, `murmur status` and `murmur swarm`.

What is heavy to import is imported by the command that needs it.
"""

import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from murmuration.coordinator import Failure
from murmuration.protos.addresses import is_loopback, split_address, with_host
from murmuration.protos.completion import TRACKERS, complete_preset, complete_setting
from murmuration.protos.events import int_of, new_event
from murmuration.protos.exit_codes import ExitCode
from murmuration.worker.views import PagePlace

if TYPE_CHECKING:
    from rich.console import Console

    from murmuration.coordinator.launch import Launch
    from murmuration.worker.identity import Authority, Identity

MEANS = ("auto", "namespaces", "relay")  # of links
_PLAIN_WIDTH = 160

link_means_option = click.option(
    "--link-means",
    type=click.Choice(MEANS),
    default="auto",
    show_default=True,
    help="The means that make links slow; namespaces need root.",
)


web_option = click.option(
    "--web",
    metavar="[HOST:]PORT",
    help="Serve a page that shows the swarm; without HOST on loopback only.",
)


_member_option = click.option(
    "--run",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The folder of a worker of that run on this machine. An encrypted run answers only its "
    "members.",
)


@click.command()
@click.option("--listen", default="127.0.0.1:7600", show_default=True, metavar="HOST:PORT")
@click.option("--expect", type=click.IntRange(min=1), help="End when this many have ended.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/coordinator"),
    show_default=True,
    help="Write report.json and loss.png here.",
)
@click.option("--log-json", "--json", "as_json", is_flag=True, help="Print events as JSON lines.")
@click.option("--insecure", is_flag=True, help="Encrypt nothing, and let anybody join.")
@web_option
def coordinator(
    listen: str, expect: int | None, out: Path, as_json: bool, insecure: bool, web: str | None
) -> None:
    """Introduce workers to each other, and watch the swarm.

    It is optional: training goes on when it ends. A coordinator that is started again learns the
    swarm back. It ends when --expect workers have delivered their results or been silent for 30 s.
    On Ctrl-C or SIGTERM it ends with what it has.
    """
    host, _ = _check_address(listen)
    page = _page_place(web, out)
    identity, authority = _identity_for(out, public=not is_loopback(host), insecure=insecure)
    import asyncio

    from murmuration.coordinator.rendezvous import CoordinatorRun
    from murmuration.coordinator.report_files import leave_results
    from murmuration.coordinator.terminal import Screen

    began_s = time.monotonic()
    if authority is not None and not as_json:
        click.echo(f"workers join with --token TOKEN, as `murmur token create {out}` gives it here")
    screen = None if as_json else Screen(sys.stdout, began_s)
    session = CoordinatorRun(screen, expect, identity, authority, page, lambda i: i.save(out))
    asyncio.run(session.run(listen))
    records = session.registry.records()
    if not records:
        click.echo("no worker has called; there is nothing to report", err=True)
        return
    report = leave_results(
        records,
        out,
        None if as_json else _console(),
        settings=session.registry.settings(),
        elapsed_s=time.monotonic() - began_s,
    )
    if as_json:
        click.echo(json.dumps(new_event("report", **report)))


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print the whole document as JSON.")
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
@_member_option
def status(address: str, as_json: bool, watches: bool, every_s: float, run: Path | None) -> None:
    """Show the state of the swarm, as any worker or coordinator sees it.

    With --watch it shows a row for each peer until Ctrl-C or the end of the run. Without a terminal
    it prints a line each time. With --json each line is a JSON object.
    """
    _check_address(address)
    from murmuration.coordinator.asking import AskedSwarm, ask
    from murmuration.coordinator.terminal import print_status, screen_for, watch
    from murmuration.worker.identity import member_identity

    identity = member_identity(run) if run is not None else None
    if watches:
        screen = None if as_json else screen_for(_console(), time.monotonic())
        watch(AskedSwarm(address, partial(ask, identity=identity)).look, screen, every_s)
        return
    document = ask(address, identity=identity)
    if as_json:
        click.echo(json.dumps(document, indent=1, default=_plain))
        return
    print_status(document, _console())


@click.command()
@click.argument("target", metavar="RUN|HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--picture/--no-picture", default=True, help="Draw loss.png too.", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Write the files in RUN, and print nothing.")
@_member_option
def report(target: str, as_json: bool, picture: bool, quiet: bool, run: Path | None) -> None:
    """Report on all peers of a run that has ended or is under way.

    RUN is the folder of `murmur swarm` or of one of the run's workers. HOST:PORT is any live peer:
    then the report is about what its peers say now.
    """
    from murmuration.coordinator.report_files import report_of_folder, report_of_swarm
    from murmuration.worker.identity import member_identity

    console = None if as_json or quiet else _console()
    if Path(target).is_dir():
        found = report_of_folder(Path(target), console, picture=picture)
    elif ":" not in target or "/" in target:
        raise Failure(
            f"{target}: there is no such folder; name that of a worker or a swarm, or HOST:PORT of "
            "a peer that lives",
            ExitCode.USAGE,
        )
    else:
        _check_address(target)
        identity = member_identity(run) if run is not None else None
        found = report_of_swarm(target, identity, console)
    if as_json:
        click.echo(json.dumps(found, indent=1))


@click.command()
@click.option("--workers", type=int, help="The number of processes, up to 64.  [default: 4]")
@click.option(
    "--preset",
    shell_complete=complete_preset,
    help="The preset: diloco, streaming, co2, onebit, sparse, noloco, streaming-noloco, kseed, ddp"
    " or local.  [default: the config's, else diloco]",
)
@click.option("--steps", type=int, metavar="N", help="The inner steps of the whole run.")
@click.option("--inner-steps", type=int, metavar="H", help="The inner steps between rounds.")
@click.option("--seed", type=int, metavar="S")
@click.option("--text", metavar="PATH", help="A file, folder or glob to learn from.")
@click.option("--model", metavar="NAME", help="The model: tiny, small or base.")
@click.option("--device", metavar="NAME", help="A device: cpu, cuda, ...  [default: auto]")
@click.option("--stages", type=click.IntRange(2), metavar="S", help="Cut the model into stages.")
@click.option("--replicas", type=click.IntRange(1), metavar="R", help="The workers of each stage.")
@click.option("--routing", metavar="NAME", help="A routing: full, random, stochastic or skip.")
@click.option("--skip", type=float, metavar="SHARE", help="Leave this share out of each route.")
@click.option("--config", type=click.Path(path_type=Path), metavar="RUN.toml")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_setting,
    help="Set one key of the configuration; may be given several times.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder for checkpoints, logs and report.  [default: runs/PRESET-TIME]",
)
@click.option("--json", "json_path", metavar="FILE", help="Write the report to FILE too.")
@click.option("--coordinator/--no-coordinator", default=False, help="Start a coordinator too.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoints in --out.")
@click.option(
    "--link",
    "links",
    multiple=True,
    metavar="LINK",
    help="The link of each worker, such as 20mbit or 20mbit,delay=50ms,jitter=5ms,loss=0.1 "
    "(connections that break a minute). w0=LINK is for one worker.",
)
@link_means_option
@click.option("--insecure", is_flag=True, help="Encrypt nothing.")
@click.option(
    "--track",
    multiple=True,
    type=click.Choice(TRACKERS),
    help="Send each worker's figures to this tracker; may be given several times.",
)
@web_option
def swarm(out: Path | None, json_path: str | None, **options: Any) -> None:
    """Train on worker processes of this machine, and report.

    The workers are processes with sockets on loopback, or on links as slow as --link says. Ctrl-C
    saves, stops and still reports.
    """
    from murmuration.coordinator.launch import Launch

    if options["resume"] and out is None:
        raise Failure(
            "--resume: name the folder of the run to go on with, as --out DIR", ExitCode.USAGE
        )
    config = options["config"]
    options["workers"] = _worker_count(options)
    _page_place(options["web"], Path())
    launch = Launch(
        out=out or _new_folder(options["preset"] or (config.stem if config else "diloco")),
        threads=Launch.fair_threads(options["workers"]),
        **options,
    )
    launch.check()
    launch = _checked_by_worker(launch)
    from murmuration.coordinator.supervisor import run_swarm

    to_stdout = json_path == "-"
    path = Path(json_path) if json_path and not to_stdout else None
    code, report = run_swarm(launch, _console(stderr=to_stdout), path)
    if to_stdout:
        click.echo(json.dumps(report, indent=1))
    sys.exit(code)


def _checked_by_worker(launch: "Launch") -> "Launch":
    """With the stages that its workers have checkpoints of, to go on with. Raises Failure: what its
    workers would refuse."""
    request = launch.request()
    if not (request["settings"] or request["config"] or launch.preset):
        return launch  # the defaults
    from murmuration.coordinator.launch import ask_worker

    answer = ask_worker(request)
    stages = int_of(answer, "stages")
    if stages != (launch.stages or 1):
        raise Failure(
            f"[stages] count is {stages}, and the workers of a swarm are counted by --stages: "
            + (f"add --stages {stages}" if stages != 1 else "leave --stages out"),
            ExitCode.CONFIGURATION,
        )
    if not launch.resume or launch.stages is None:
        return launch
    return launch.resumed(answer["held"])


def _worker_count(options: Mapping[str, Any]) -> int:
    """As many as the stages take. Raises Failure: options that do not fit one another."""
    workers, stages, replicas = options["workers"], options["stages"], options["replicas"]
    if stages is None:
        for flag in ("replicas", "routing", "skip"):
            if options[flag] is not None:
                raise Failure(
                    f"--{flag}: of a model in stages; add --stages, such as --stages 4",
                    ExitCode.USAGE,
                )
        return 4 if workers is None else int(workers)
    if workers is not None and (workers % stages or replicas not in (None, workers // stages)):
        raise Failure(
            f"--workers {workers}: {stages} stages of {replicas or 'equally many'} replicas are "
            f"something else; leave --workers out",
            ExitCode.USAGE,
        )
    return int(stages * (replicas or (workers // stages if workers else 1)))


def _check_address(address: str) -> tuple[str, int]:
    try:
        return split_address(address)
    except ValueError as error:
        raise Failure(str(error), ExitCode.USAGE) from error


def _page_place(web: str | None, folder: Path) -> PagePlace | None:
    """Raises Failure: it is neither a port nor HOST:PORT."""
    try:
        return None if web is None else PagePlace(with_host(web), folder)
    except ValueError as error:
        raise Failure(
            f"--web {web}: write a port of this machine, such as 8900, or HOST:PORT where others "
            "are to read it",
            ExitCode.USAGE,
        ) from error


def _identity_for(
    out: Path, *, public: bool, insecure: bool
) -> "tuple[Identity | None, Authority | None]":
    """The coordinator's certificate and, if its run begins here, the run's key; neither where
    nothing is encrypted. Raises IdentityError."""
    from murmuration.worker.identity import Authority, Identity, IdentityError, Role

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


def _new_folder(name: str) -> Path:
    """A folder that is not there yet, named after the run and the time."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    coordinator(prog_name="murmur coordinator")
