"""What Windows lacks is not asked for at import, and a user's own `worker.py` is named."""

import subprocess
import sys
from pathlib import Path

# Libraries first: they know their systems. What is left are the imports of our own modules.
_IMPORTS = """
import builtins, os, pkgutil, importlib, signal, socket
import click, cryptography, filelock, grpc.aio, matplotlib, prometheus_client, rich.console, torch
import grpc_health.v1.health, torch.distributed.fsdp
OURS = ("algorithms", "coordinator", "murmuration", "protos", "worker")
LACKS = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
find = builtins.__import__

def on_windows(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__", "").partition(".")[0]
    if asks in OURS and name.partition(".")[0] in LACKS:
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
adapters = ("murmuration.worker.library.hf", "murmuration.worker.library.lightning", "murmuration.worker.cli.__main__")
for name in OURS:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if found.name not in adapters and found.name != "murmuration.protos.generate":
            importlib.import_module(found.name)
            count += 1
from murmuration.worker.cli import cli
for name in cli.list_commands(None):
    cli.get_command(click.Context(cli), name).make_context(name, ["--help"], resilient_parsing=True)
print(count)
"""


def test_no_module_asks_at_import_for_what_windows_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150


def test_a_users_own_module_in_the_place_of_ours_is_named(tmp_path: Path) -> None:
    hides = tmp_path / "worker.py"
    hides.touch()
    script = tmp_path / "train.py"
    script.write_text("import murmuration\n")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"'worker', and {hides} stands in its place: rename that" in last


def test_the_commands_do_not_mind_what_is_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("raise SystemExit('not this')")
    murmur = Path(sys.executable).with_name("murmur")
    done = subprocess.run(
        [murmur, "join", "--help"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
