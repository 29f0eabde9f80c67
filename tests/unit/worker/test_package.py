"""The package as others have it: on Windows, beside modules of a user, by its errors."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

import murmuration
from murmuration.worker import cli, errors
from murmuration.worker.errors import MurmurError

# Libraries first: they know their systems. What is left are the imports of our own modules.
_IMPORTS = """
import builtins, os, pkgutil, importlib, signal, socket
import click, cryptography, filelock, grpc.aio, prometheus_client, rich.console, torch
import grpc_health.v1.health
LACKS = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
find = builtins.__import__

def on_windows(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__", "").partition(".")[0]
    if asks == "murmuration" and name.partition(".")[0] in LACKS:
        raise ImportError(f"{globals['__name__']} asks for {name}")
    return find(name, globals, locals, fromlist, level)

builtins.__import__ = on_windows
for module, names in (
    (signal, ["SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2"]),
    (socket, ["AF_UNIX"]),
    (os, ["fork", "geteuid", "getuid", "killpg", "sched_getaffinity", "setsid", "uname"]),
):
    for name in names:
        delattr(module, name)
count = 0
others = ("worker.library.hf", "worker.library.lightning", "worker.cli.__main__")
import murmuration
for found in pkgutil.walk_packages(murmuration.__path__, "murmuration."):
    if found.name.removeprefix("murmuration.") not in others:
        importlib.import_module(found.name)
        count += 1
from murmuration.worker.cli import cli
for name in cli.list_commands(None):
    cli.get_command(click.Context(cli), name).make_context(name, ["--help"], resilient_parsing=True)
print(count, *murmuration.__all__)
"""


def test_windows_lacks_nothing_and_a_users_own_modules_are_in_nobodys_way(tmp_path):
    for hides in ("worker.py", "protos/__init__.py", "algorithms.py"):
        (tmp_path / hides).parent.mkdir(exist_ok=True)
        (tmp_path / hides).write_text("raise SystemExit('not this')")
    script = tmp_path / "train.py"
    script.write_text(_IMPORTS)
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    count, *names = done.stdout.split()
    assert int(count) > 150
    assert "Swarm" in names
    assert all(hasattr(murmuration, name) for name in names)


def test_murmur_is_what_is_installed():
    (murmur,) = entry_points(group="console_scripts", name="murmur")
    assert murmur.load() is cli.main


DRAWN = re.compile(r"^    ( *)([A-Z]\w+) +(\d+) ", re.MULTILINE)


def tree(kind: type[MurmurError], depth: int = 0) -> Iterator[tuple[int, str, int]]:
    yield depth, kind.__name__, int(kind.exit_code)
    for below in kind.__subclasses__():
        yield from tree(below, depth + 1)


def test_the_tree_of_errors_is_the_one_that_is_drawn_with_its_exit_codes():
    assert all(hasattr(murmuration, name) for name in murmuration.__all__)  # loaded by that
    drawn = [
        (len(space) // 4, name, int(code)) for space, name, code in DRAWN.findall(errors.__doc__)
    ]
    assert sorted(drawn) == sorted(tree(MurmurError))


def test_every_error_that_a_loop_may_meet_is_a_name_of_the_library():
    inner = {"Unreachable", "Untrusted", "Refused", "Busy"}
    assert {name for _, name, _ in tree(MurmurError)} - inner <= set(murmuration.__all__)
