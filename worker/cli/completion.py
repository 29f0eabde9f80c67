"""`murmur completion`: what a shell needs to complete commands, options and their values."""

import click
from click.shell_completion import get_completion_class

from worker.errors import UsageError

_VARIABLE = "_MURMUR_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    \b
    bash   eval "$(murmur completion bash)"                       in ~/.bashrc
    zsh    eval "$(murmur completion zsh)"                        in ~/.zshrc, after compinit
    fish   murmur completion fish > ~/.config/fish/completions/murmur.fish
    """
    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"{shell}: no completion for this shell")
    click.echo(found(context.find_root().command, {}, "murmur", _VARIABLE).source())
    return 0
