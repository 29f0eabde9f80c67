"""A Docker engine for compose-test: the one that answers, or one started from Debian's packages."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "murmuration"
APT_TIMEOUT_S = 600
ENGINE_START_TIMEOUT_S = 60
ENGINE_STOP_TIMEOUT_S = 30


class Failure(Exception):
    """Ends compose-test with one line that names the cause and the fix."""


def say(line: str) -> None:
    """Print one line of progress at once, so that pipes and CI logs show it in time."""
    print(line, flush=True)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    check: bool = True,
    quiet: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or to the end of its time.

    Args:
        timeout_s: after that the command and its children are killed.
        check: raise when it exits with another status than 0.
        quiet: keep its output (stdout and stderr together) instead of passing it on.

    Raises:
        Failure: with the last lines of its output, if ``check`` is set or the time was up.
    """
    words = [str(word) for word in command]
    output = subprocess.PIPE if quiet else None
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        errors="replace",
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        text, _ = process.communicate()
        if check:
            raise Failure(f"{_shown(words)}: no end after {timeout_s:.0f} s{_tail(text)}") from None
    except BaseException:
        _kill_group(process)
        raise
    if check and process.returncode != 0:
        raise Failure(f"{_shown(words)}: exit status {process.returncode}{_tail(text)}")
    return subprocess.CompletedProcess(words, process.returncode, text or "", "")


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _shown(words: Sequence[str]) -> str:
    return " ".join(words) if len(words) < 8 else " ".join([*words[:7], "..."])


def _tail(text: str | None, lines: int = 25) -> str:
    kept = (text or "").strip().splitlines()[-lines:]
    return "".join(f"\n    {line}" for line in kept)


def wait_until(condition: Callable[[], bool], *, timeout_s: float, every_s: float = 0.5) -> bool:
    """Poll a condition; False if it was not met in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)  # an engine that starts tells nobody
    return True


@contextlib.contextmanager
def locked(timeout_s: float) -> Iterator[None]:
    """Hold the cache folder: two compose-tests on one machine run one after the other."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:

        def free() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not free():
            say("another compose-test is running on this machine: waiting for it")
            if not wait_until(free, timeout_s=timeout_s):
                raise Failure(f"another compose-test still runs after {timeout_s:.0f} s")
        yield


def install(packages: Sequence[str], *, purpose: str) -> None:
    """Install Debian packages, or say in one line what to install by hand."""
    listed = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Failure(
            f"{purpose} is missing; install it (on Debian, as root: apt-get install {listed})"
        )
    say(f"installing {listed}")
    # RUNLEVEL=1 keeps the packages from starting an engine of their own where no systemd runs.
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    run([*apt, "update"], timeout_s=APT_TIMEOUT_S, check=False, env=env)
    command = [*apt, "install", "--yes", "--no-install-recommends", *packages]
    run(command, timeout_s=APT_TIMEOUT_S, env=env)


def answers() -> bool:
    """Tells whether the client finds a running engine (DOCKER_HOST counts, as everywhere)."""
    if shutil.which("docker") is None:
        return False
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    return run(command, timeout_s=20, check=False).returncode == 0


def compose_command() -> list[str] | None:
    """Compose version 2 if the client has it, version 1 otherwise."""
    for command in (["docker", "compose"], ["docker-compose"]):
        found = shutil.which(command[0]) is not None
        if found and run([*command, "version"], timeout_s=30, check=False).returncode == 0:
            return command
    return None


@contextlib.contextmanager
def engine() -> Iterator[list[str]]:
    """A running engine with Compose, and the command of Compose.

    Missing packages are installed. An engine that already answers is used and left alone; one
    that had to be started is stopped at the end. Its images stay in the cache folder.
    """
    running = answers()
    needed = []
    if not running and (shutil.which("dockerd") is None or shutil.which("docker") is None):
        needed.append("docker.io")
    if not running and shutil.which("iptables") is None:
        needed.append("iptables")
    if compose_command() is None:
        needed.append("docker-compose")
    if needed:
        install(needed, purpose="a Docker engine with Compose")
    compose = compose_command()
    if compose is None:
        raise Failure("neither `docker compose` nor `docker-compose` works; install Compose")
    if answers():
        yield compose
    elif os.geteuid() != 0:
        raise Failure("no Docker engine answers; start one, or run as root to have one started")
    else:
        with _started_engine():
            yield compose


@contextlib.contextmanager
def _started_engine() -> Iterator[None]:
    folder = CACHE / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    pidfile, log = folder / "dockerd.pid", folder / "dockerd.log"
    _stop(pidfile)  # Left behind by a compose-test that was killed.
    network = _Network(folder / "network.json")
    command = [
        *("dockerd", "--host", f"unix://{folder}/docker.sock", "--pidfile", str(pidfile)),
        *("--data-root", str(CACHE / "docker"), "--exec-root", str(folder / "exec")),
    ]
    before = os.environ.get("DOCKER_HOST")
    started_s = time.monotonic()
    with log.open("w") as output:
        daemon = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    try:

        def ready() -> bool:
            return daemon.poll() is not None or answers()

        if not wait_until(ready, timeout_s=ENGINE_START_TIMEOUT_S) or daemon.poll() is not None:
            raise Failure(f"dockerd did not start{_tail(log.read_text(errors='replace'))}")
        say(f"started an engine of our own in {time.monotonic() - started_s:.1f} s")
        yield
    finally:
        _stop(pidfile, daemon)
        network.restore()
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before


def _stop(pidfile: Path, daemon: subprocess.Popen[bytes] | None = None) -> None:
    """Stop the engine of a pid file, by that pid and only if it is a dockerd."""
    try:
        pid = daemon.pid if daemon else int(pidfile.read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        name = ""
    if name == "dockerd":

        def gone() -> bool:
            return daemon.poll() is not None if daemon else not Path(f"/proc/{pid}").exists()

        os.kill(pid, signal.SIGTERM)
        if not wait_until(gone, timeout_s=ENGINE_STOP_TIMEOUT_S, every_s=0.1):
            print(f"dockerd ({pid}) did not stop in time: killed", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
            wait_until(gone, timeout_s=5, every_s=0.1)
    pidfile.unlink(missing_ok=True)


class _Network:
    """The host's packet filter and forwarding as they were, to be put back after our engine.

    They are kept in a file, so that the test after a killed one still puts the right ones back.
    """

    _forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    _bridge = Path("/sys/class/net/docker0")

    def __init__(self, file: Path) -> None:
        self._file = file
        if not file.exists():
            rules = self._rules("filter")
            before = {
                "bridge": self._bridge.exists(),
                "forwarding": self._forwarding.read_text().strip(),
                "accepting": "-P FORWARD ACCEPT" in rules,
                "rules": any("DOCKER" in rule for rule in rules),
            }
            file.write_text(json.dumps(before))
        self._before = json.loads(file.read_text())

    @staticmethod
    def _rules(table: str) -> list[str]:
        output = run(["iptables", "-t", table, "-S"], timeout_s=20, check=False).stdout
        return output.splitlines()

    def restore(self) -> None:
        """Put back what was there before the engine started."""
        if not self._before["rules"]:
            for table in ("filter", "nat"):
                self._remove_rules(table)
        if self._before["accepting"]:
            self._change("filter", "-P", "FORWARD", "ACCEPT")
        if not self._before["bridge"] and self._bridge.exists():
            run(["ip", "link", "delete", "docker0"], timeout_s=20, check=False)
        self._forwarding.write_text(self._before["forwarding"])
        self._file.unlink()

    def _remove_rules(self, table: str) -> None:
        ours = [r for r in self._rules(table) if "DOCKER" in r or "docker0" in r]
        chains = [rule.split()[1] for rule in ours if rule.startswith("-N ")]
        for rule in ours:
            if rule.startswith("-A "):
                self._change(table, "-D", *rule.split()[1:])
        for option in ("-F", "-X"):
            for chain in chains:
                self._change(table, option, chain)

    @staticmethod
    def _change(table: str, *words: str) -> None:
        run(["iptables", "-t", table, *words], timeout_s=20, check=False)
