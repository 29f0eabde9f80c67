"""Scripts of deploy/, run by hand with a `murmur` that only tells of itself."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

# It ends with $CODE at once; or, if it $STAYS, when it is told to.
MURMUR = """#!/bin/bash
printf '%s\\n' "$@" > "$FOLDER/typed"
[ -z "$STAYS" ] && exit "${CODE:-0}"
trap 'exit 0' TERM
mkfifo "$FOLDER/silent"
exec 3<>"$FOLDER/silent"
echo trains
read -r -u 3
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a command. Args: programs: that it finds besides `murmur`, by name."""

    def run(
        command: list[Any], programs: dict[str, str], **environment: str
    ) -> "subprocess.Popen[str]":
        for name, text in {"murmur": MURMUR, **programs}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path), **environment}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    return run


@pytest.fixture
def typed(tmp_path: Path) -> Callable[[click.Command], dict[str, Any]]:
    """The options that a command makes of the words that `murmur` was given."""

    def read(command: click.Command) -> dict[str, Any]:
        name, *words = (tmp_path / "typed").read_text().splitlines()
        assert name == command.name
        return command.make_context(name, words).params

    return read
