"""Windows lacks nothing that is asked for at import; a `worker.py` of a user is in nobody's way."""

import subprocess
import sys
from importlib.metadata import entry_points

import murmuration
from murmuration.worker import cli

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
