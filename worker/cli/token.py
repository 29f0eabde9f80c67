"""`murmur token`: lets other machines into a run that was begun on this one."""

import json
import time
from pathlib import Path

import click

from murmuration.worker.identity.authority import TOKEN_USES, TOKEN_VALID_S, Authority
from murmuration.worker.identity.certificates import IdentityError

_HOUR_S = 3600.0
_run = click.argument("run", type=click.Path(path_type=Path, file_okay=False), metavar="RUN")


@click.group()
def token() -> None:
    """Let machines into the run whose key is in the folder RUN.

    RUN is the --out of the worker or coordinator that began the run. A token is a secret: whoever
    has it may join."""


@token.command()
@_run
@click.option(
    "--uses",
    type=click.IntRange(1),
    default=TOKEN_USES,
    show_default=True,
    help="The number of peers that it lets in.",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0.01, max=24 * 366),
    default=TOKEN_VALID_S / _HOUR_S,
    show_default=True,
    help="The hours until the token expires.",
)
def create(run: Path, uses: int, hours: float) -> None:
    """Print a new token, to be pasted as `murmur join HOST:PORT --token TOKEN`.

    In a folder without a key it makes one. A worker that begins its run there is encrypted."""
    if (authority := Authority.load(run)) is None:
        try:
            authority = Authority.make(run)
        except OSError as error:
            raise IdentityError(f"{run}: no key can be kept there: {error.strerror}") from error
        told = "has the key of a run that nobody has begun; begin it: murmur up --out"
        click.echo(f"{run} {told} {run}", err=True)
    made = authority.create_token(uses, hours * _HOUR_S)
    click.echo(str(made))
    click.echo(
        f"token {made.id} lets {uses} in within {hours:g} h; `murmur token revoke {run} {made.id}` "
        "ends it",
        err=True,
    )


@token.command("list")
@_run
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_tokens(run: Path, as_json: bool) -> None:
    """Show the tokens of RUN, and whom they have let in, without the secrets."""
    records, now = _held(run).tokens(), time.time()
    if as_json:
        keys = ("uses", "admitted", "expires")
        rows = [
            {"id": each.id, "state": each.state(now)} | {key: getattr(each, key) for key in keys}
            for each in records
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("token", "state", "uses", "expires", "has let in")
    for each in records:
        expires = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.expires))
        used = f"{len(each.admitted)} of {each.uses}"
        table.add_row(each.id, each.state(now), used, expires, ", ".join(each.admitted))
    Console(highlight=False).print(table)


@token.command()
@_run
@click.argument("token_id", metavar="ID")
def revoke(run: Path, token_id: str) -> None:
    """End a token, so that it lets nobody in. Peers that it has let in stay."""
    _held(run).revoke(token_id)
    click.echo(f"token {token_id} is revoked")


@token.command()
@_run
@click.argument("peer", metavar="PEER")
def expel(run: Path, peer: str) -> None:
    """Take back the certificate of a peer: no peer of the run speaks with it any more.

    The worker or coordinator of RUN tells the others, as soon as it runs."""
    _held(run).expel(peer)
    click.echo(f"peer {peer} is expelled")


@token.command()
@_run
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
def share(run: Path, folder: Path) -> None:
    """Give the run's key to a second worker, whose --out is DIR: it lets machines in as well.

    DIR holds the run's secret afterwards: move it to the other machine as one moves a secret.
    Tokens from before work at both, as often as each allows. Revoke and expel count for all."""
    _held(run).share(folder)
    click.echo(f"{folder} holds the run's key too; `murmur token create {folder}` works there")


def _held(run: Path) -> Authority:
    if (authority := Authority.load(run)) is None:
        raise IdentityError(
            f"{run} does not hold a run's key: name the --out of the worker or coordinator that "
            "began the run"
        )
    return authority
