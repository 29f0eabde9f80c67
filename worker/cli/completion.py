"""`murmur completion`: what a shell needs to complete commands, options and their values."""

import click
from click.shell_completion import get_completion_class

from murmuration.worker.errors import UsageError

_VARIABLE = "_MURMUR_COMPLETE"
# As click's, but that a word is what is typed as one: bash cuts it at each `=`, so that of
# `--set diloco.codec=in` click would see three. What comes back replaces the last part alone.
_BASH = """\
_murmur_completion() {
    local IFS=$'\\n' words=() index word own before type value response
    for ((index = 0; index <= COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if ((index > 1)) && [[ $word == "=" || ${COMP_WORDS[index - 1]} == "=" ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
    done
    word=${words[-1]} own=${COMP_WORDS[COMP_CWORD]}
    [[ $own == "=" ]] && own=""
    before=${word%"$own"}
    [[ $before == --* ]] && before=${before#*=}
    response=$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) \\
        _MURMUR_COMPLETE=bash_complete "$1")
    COMPREPLY=()
    for word in $response; do
        IFS=, read -r type value <<< "$word"
        case $type in
            dir) compopt -o dirnames 2> /dev/null ;;
            file) compopt -o default 2> /dev/null ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2> /dev/null
    return 0
}
complete -o nosort -F _murmur_completion murmur
"""


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
    if shell == "bash":
        click.echo(_BASH)
        return 0
    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"{shell}: no completion for this shell")
    click.echo(found(context.find_root().command, {}, "murmur", _VARIABLE).source())
    return 0
