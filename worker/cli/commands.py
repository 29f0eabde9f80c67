"""The worker's commands: `up`, `join`, `generate`. Heavy modules load when a command runs."""

import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from worker.config import Config

_JOIN_S = 10.0


def _worker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `up` and `join` share."""
    for option in reversed(
        (
            click.option("--name", help="This peer's name; the host's name and port by default."),
            click.option("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0: a free one."),
            click.option("--advertise", help="HOST:PORT that others reach this peer at."),
            click.option("--coordinator", help="HOST:PORT of a coordinator, if there is one."),
            click.option("--out", type=click.Path(path_type=Path), default=Path("runs/worker")),
            click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in OUT."),
            click.option("--insecure", is_flag=True, help="Serve other machines unencrypted."),
            click.option("--json", "as_json", is_flag=True, help="Events as JSON lines."),
            click.option("--threads", type=click.IntRange(1), help="Of torch; its own default."),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--join", "joins", multiple=True, help="HOST:PORT of a peer, tried until it answers.")
@click.option("--min-peers", type=click.IntRange(1), default=1, help="Start when so many are here.")
@click.option("--wait-s", type=click.FloatRange(min=0.1), default=120.0, show_default=True)
@click.option("--preset", help="diloco, ddp or local.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE")
@_worker_options
def up(
    run: Path | None,
    joins: tuple[str, ...],
    min_peers: int,
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
    return _run(config, joins=joins, min_peers=min_peers, wait_s=wait_s, **worker)


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--config", type=click.Path(path_type=Path), help="Refuse if the run's differs.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE")
@_worker_options
def join(address: str, config: Path | None, settings: tuple[str, ...], **worker: Any) -> int:
    """Join the swarm that any of its peers at HOST:PORT belongs to.

    The run's settings come from that peer. --config and --set are compared with them, and the first
    difference is named.
    """
    from worker.config import load_config, to_document
    from worker.errors import ManifestRefused
    from worker.joining import fetch_manifest
    from worker.manifest import first_difference

    _check_addresses(address, **worker)
    manifest = fetch_manifest(address, timeout_s=_JOIN_S)
    theirs = manifest.config(f"the run at {address}")
    if config is not None or settings:
        ours = load_config(config, settings)
        if difference := first_difference(to_document(ours), to_document(theirs)):
            raise ManifestRefused(
                f"{address} runs something else: {difference}; use the same TOML, or none"
            )
    return _run(theirs, joins=(address,), min_peers=2, wait_s=_JOIN_S, **worker)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--bytes", "n_tokens", type=click.IntRange(1), default=400, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def generate(run: Path, prompt: str, n_tokens: int, temperature: float, seed: int) -> int:
    """Continue PROMPT with the newest anchor under the folder RUN."""
    from worker.generate import generate_text

    click.echo(prompt + generate_text(run, prompt, n_tokens, temperature, seed))
    return 0


def _run(
    config: "Config",
    *,
    name: str | None,
    listen: str,
    advertise: str | None,
    coordinator: str | None,
    out: Path,
    resume: bool,
    insecure: bool,
    as_json: bool,
    threads: int | None,
    joins: tuple[str, ...],
    min_peers: int,
    wait_s: float,
) -> int:
    import torch

    from worker.daemon import WorkerOptions, print_line, run_worker
    from worker.node import NodeConfig
    from worker.terminal import announce_plainly

    port = int(listen.rpartition(":")[2])
    if threads is not None:
        torch.set_num_threads(threads)
    node = NodeConfig(
        peer=name or f"{socket.gethostname()}-{port if port else 'auto'}-{_short_id()}",
        advertise=advertise,
        joins=joins,
        coordinator=coordinator,
        # Whoever names others does not want to train alone.
        min_peers=max(min_peers, 2) if joins else min_peers,
        wait_s=wait_s,
    )
    announce = print_line if as_json else announce_plainly
    options = WorkerOptions(node=node, listen=listen, out=out, resume=resume, announce=announce)
    return run_worker(config, options)


def _check_addresses(
    *others: str,
    listen: str,
    advertise: str | None,
    coordinator: str | None,
    insecure: bool,
    **_: Any,
) -> None:
    """Raises UsageError for what is no HOST:PORT, ConfigError for a public one not asked for."""
    for address in (listen, *filter(None, (advertise, coordinator)), *others):
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


def _short_id() -> str:
    return secrets.token_hex(2)
