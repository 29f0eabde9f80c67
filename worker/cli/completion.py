"""`murmur completion`: what a shell needs to complete commands, options and their values."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   eval "$(murmur completion bash)"                       in ~/.bashrc
    zsh    eval "$(murmur completion zsh)"                        in ~/.zshrc, after compinit
    fish   murmur completion fish > ~/.config/fish/completions/murmur.fish"""
    found = get_completion_class(shell)
    assert found is not None, "click knows these three"
    click.echo(found(context.find_root().command, {}, "murmur", "_MURMUR_COMPLETE").source())
