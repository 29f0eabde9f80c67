"""The worker's commands: `up`, `join`, `generate`. Heavy modules load when a command runs."""

import ipaddress
import math
import socket
import time
import uuid
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from worker.config import Config

_JOIN_S = 10.0
_STARTED = time.monotonic()


def _worker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `up` and `join` share."""
    for option in reversed(
        (
            click.option(
                "--name", help="This peer's name; by default the host's, and a mark of --out."
            ),
            click.option("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0: a free one."),
            click.option("--advertise", help="HOST:PORT that others reach this peer at."),
            click.option("--coordinator", help="HOST:PORT of a coordinator, if there is one."),
            click.option("--proxy", help="HOST:PORT of an HTTP CONNECT proxy to reach others by."),
            click.option("--out", type=click.Path(path_type=Path), default=Path("runs/worker")),
            click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in OUT."),
            click.option("--insecure", is_flag=True, help="Serve other machines unencrypted."),
            click.option("--json", "as_json", is_flag=True, help="Events as JSON lines."),
            click.option("--stage", type=click.IntRange(0), help="Of a model in stages, to serve."),
            click.option("--threads", type=click.IntRange(1), help="Of torch; its own default."),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--join", "joins", multiple=True, help="HOST:PORT of a peer, tried until the start.")
@click.option("--min-peers", type=click.IntRange(1), help="Start when so many are here: 1, or 2.")
@click.option("--wait-s", type=click.FloatRange(min=0.1), default=120.0, show_default=True)
@click.option("--preset", help="diloco, streaming, noloco, streaming-noloco, ddp or local.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE")
@_worker_options
def up(
    run: Path | None,
    joins: tuple[str, ...],
    min_peers: int | None,
    wait_s: float,
    preset: str | None,
    settings: tuple[str, ...],
    **worker: Any,
) -> int:
    """Start a worker, the first of a swarm or one of several.

    RUN is the run's TOML file; without one the defaults train on Python's own sources.
    """
    from worker.config import load_config

    _check_addresses(*joins, **worker)
    config = load_config(run, settings, preset)
    # Whoever names others does not want to train alone.
    wanted = min_peers or (2 if joins else 1)
    if config.stages.count > 1 and worker["stage"] is None:
        raise UsageError(
            f"this run has {config.stages.count} stages: say which one this worker serves with "
            f"--stage 0 to {config.stages.count - 1}, or join a run under way with `murmur join`"
        )
    _check_cut(config, worker["stage"])
    return _run(config, joins=joins, min_peers=wanted, wait_s=wait_s, **worker)


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--config", type=click.Path(path_type=Path), help="This machine's TOML file.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE")
@_worker_options
def join(address: str, config: Path | None, settings: tuple[str, ...], **worker: Any) -> int:
    """Join the swarm that the worker or coordinator at HOST:PORT belongs to.

    The run's settings come from there. What --config and --set say of the run must agree with them,
    else the first difference is named; what they say of this machine is used.
    """
    from worker.catchup.bootstrap import fetch_manifest
    from worker.config import join_config

    _check_addresses(address, **worker)
    # Ten seconds from when the command was typed, the time to load torch included.
    timeout_s = max(3.0, _JOIN_S - (time.monotonic() - _STARTED))
    manifest, coordinated = fetch_manifest(address, timeout_s, worker["proxy"])
    if coordinated:
        worker["coordinator"] = address
    merged = join_config(manifest.sections, config, settings, address)
    _check_cut(merged, worker["stage"])
    # A joiner never starts a run by itself; it waits as long as those who are there do.
    joins = () if coordinated else (address,)
    if merged.stages.count > 1 and worker["stage"] is None:
        from worker.pipeline.newcomer import stage_to_serve

        worker["stage"] = stage_to_serve(address, merged.stages, worker["proxy"])
    return _run(merged, joins=joins, min_peers=None, wait_s=math.inf, **worker)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--bytes", "n_tokens", type=click.IntRange(1), default=400, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def generate(run: Path, prompt: str, n_tokens: int, temperature: float, seed: int) -> int:
    """Continue PROMPT with the newest anchor under the folder RUN."""
    from worker.training.evaluation import generate_text

    pieces = generate_text(run, prompt, n_tokens, temperature, seed)
    for piece in chain((prompt,), pieces, ("\n",)):
        click.echo(piece, nl=False)  # which flushes: to be read while the next one is made
    return 0


def _run(
    config: "Config",
    *,
    name: str | None,
    listen: str,
    advertise: str | None,
    coordinator: str | None,
    proxy: str | None,
    out: Path,
    resume: bool,
    insecure: bool,
    as_json: bool,
    stage: int | None,
    threads: int | None,
    joins: tuple[str, ...],
    min_peers: int | None,
    wait_s: float,
) -> int:
    import torch

    from worker.cli.terminal import announce_plainly
    from worker.daemon import WorkerOptions, print_line, run_worker
    from worker.node import NodeConfig

    if threads is not None:
        torch.set_num_threads(threads)
    node = NodeConfig(
        peer=name or _default_name(out),
        advertise=advertise,
        joins=joins,
        coordinator=coordinator,
        min_peers=min_peers,
        stage=stage or 0,
        wait_s=wait_s,
    )
    announce = print_line if as_json else announce_plainly
    options = WorkerOptions(
        node=node, listen=listen, proxy=proxy, out=out, resume=resume, announce=announce
    )
    return run_worker(config, options)


def _check_cut(config: "Config", stage: int | None) -> None:
    """Raises UsageError: a stage of a model that has none."""
    if stage is not None and config.stages.count == 1:
        raise UsageError(
            f"--stage {stage}: the model of this run is not cut into stages; leave it out, or set "
            "stages.count"
        )


def _check_addresses(
    *others: str,
    listen: str,
    advertise: str | None,
    coordinator: str | None,
    proxy: str | None,
    insecure: bool,
    **_: Any,
) -> None:
    """Raises UsageError for what is no HOST:PORT, ConfigError for a public one not asked for."""
    for address in (listen, *filter(None, (advertise, coordinator, proxy)), *others):
        host, colon, port = address.rpartition(":")
        number = int(port) if port.isascii() and port.isdigit() else -1
        if not colon or not host or not 0 <= number <= 65535:
            raise UsageError(f"{address!r} is no HOST:PORT, such as 192.0.2.7:7700")
    if not insecure and not _is_loopback(listen.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"--listen {listen}: reachable from other machines, and this version does not encrypt; "
            "type --insecure to accept that, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _default_name(out: Path) -> str:
    """The same for every start on this machine with this folder: samples depend on the name."""
    place = f"{uuid.getnode()}/{out.resolve()}"
    return f"{socket.gethostname()}-{zlib.crc32(place.encode()):08x}"
