"""Pictures of the page and of `murmur status --watch`: of eight workers one is dead, slow, relayed.

    python -m tests.lab page-shots [--out docs] [--seconds 150]

A real swarm in network namespaces, one worker behind a slow link. The eighth joins later; nobody
can dial what it advertises. It is this one that serves the page, which a headless Chromium draws.
"""

import argparse
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from PIL import Image
from rich.console import Console

from murmuration.coordinator.report.status import AskedSwarm, ask
from murmuration.coordinator.report.terminal import swarm_table
from murmuration.protos.addresses import ReservedPorts, split_address
from murmuration.worker.identity import Authority, Role, member_identity
from murmuration.worker.views.history import History
from tests.lab.polling import seconds_until
from tests.support.browser import CHROMIUM, picture

DEAD, SLOW, RELAYED = "w3", "w5", "w7"
LINKS = ("--link", "100mbit", "--link", f"{SLOW}=2mbit")
SETTINGS = ("--set", "membership.suspicion_factor=2")
RUN = (
    "--workers", "7", "--steps", "6000", "--inner-steps", "50",
    "--set", "task.batch_size=2", "--set", "task.context_bytes=64",
    "--set", "run.evaluate_every=200", *SETTINGS,
)  # fmt: skip
WIDE, PHONE = (1280, 1730), (500, 2500)
COLOURS = 128  # of a picture: a third of its bytes
PATIENCE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--seconds", type=float, default=150, help="of training before the kill")
    asked = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    with ExitStack() as started, ReservedPorts(1) as ports:
        folder = started.enter_context(tempfile.TemporaryDirectory())
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "murmuration.worker.cli", "swarm", *RUN, *LINKS]
        start(started, [*command, "--out", str(out)], Path(folder) / "log")
        until(lambda: event_of(out / "w0", "started") is not None, "a start")
        joins = [*join_command(out), "--web", ports.addresses[0]]
        start(started, joins, Path(folder) / "relayed.log")
        take(f"http://{ports.addresses[0]}/", out, asked.out, asked.seconds)


def start(started: ExitStack, command: list[str], log_path: Path) -> None:
    """A process that is interrupted and waited for at the end."""
    with log_path.open("w") as log:
        # A session of its own, as the launcher's workers have: Linux shares cores by session.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    started.callback(process.wait)
    started.callback(process.send_signal, signal.SIGINT)


def join_command(run: Path) -> list[str]:
    """Of a worker on this machine whose advertised port nobody listens on."""
    authority = Authority.load(run)
    assert authority is not None
    authority.new_identity(Role.PEER, RELAYED).save(run / RELAYED)
    first, _ = address_and_pid(run / "w0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect(split_address(first))
        host = towards.getsockname()[0]
    return [
        sys.executable, "-m", "murmuration.worker.cli", "join", first, "--name", RELAYED,
        "--threads", "1", "--listen", f"{host}:0", "--advertise", f"{host}:9",
        "--out", str(run / RELAYED), *SETTINGS,
    ]  # fmt: skip


def take(url: str, run: Path, out: Path, seconds: float) -> None:
    """Waits for what is to be seen, and takes the pictures."""
    until(lambda: at_work(url) == 8, "eight peers that train")
    time.sleep(seconds)  # for curves that show something
    until(lambda: any(v["peer"] == SLOW for v in read(url)["verdicts"]), f"a verdict on {SLOW}")
    os.kill(address_and_pid(run / DEAD)[1], signal.SIGKILL)
    until(lambda: at_work(url) == 7, "a dead peer")
    time.sleep(20)  # rounds without it
    for name, (width, height), dark in (
        ("page.png", WIDE, False), ("page-dark.png", WIDE, True), ("page-phone.png", PHONE, False),
    ):  # fmt: skip
        picture(url, out / name, width=width, height=height, dark=dark)
        with Image.open(out / name) as taken:
            taken.quantize(COLOURS).save(out / name, optimize=True)
    swarm, history = AskedSwarm(address_and_pid(run / "w0")[0], asked_by(run)), History(2.0)
    history.add(swarm.look())
    time.sleep(2)  # rates are of the time between two looks
    history.add(swarm.look())
    screen = Console(record=True, width=180, file=io.StringIO())
    screen.print(swarm_table(history.summary()))
    drawn = screen.export_svg(title="murmur status HOST:PORT --watch")
    fonts = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # which it would load from elsewhere
    (out / "status-watch.svg").write_text(fonts.sub("", drawn))
    for path in sorted(out.glob("page*.png")):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    print(f"verdicts: {read(url)['verdicts']}")


def asked_by(run: Path) -> Any:
    identity = member_identity(run)
    return lambda address, timeout_s: ask(address, timeout_s, identity)


def until(reached: Callable[[], bool], what: str) -> None:
    """Ends the bench if it does not come to that."""

    def seen() -> bool:
        with suppress(URLError, ConnectionError, FileNotFoundError):
            return reached()
        return False

    if seconds_until(seen, PATIENCE_S, every_s=1.0) is None:
        sys.exit(f"no {what} in {PATIENCE_S:.0f} s")


def at_work(url: str) -> int:
    """How many peers train, or wait for a round."""
    states = [row["state"] for row in read(url)["peers"] if row["answers"]]
    return sum(state in ("training", "waiting") for state in states)


def read(url: str) -> dict[str, Any]:
    with urlopen(f"{url}api/swarm") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def address_and_pid(folder: Path) -> tuple[str, int]:
    """Of a worker, by its log."""
    told = event_of(folder, "listening")
    assert told is not None
    return told["address"], told["pid"]


def event_of(folder: Path, kind: str) -> dict[str, Any] | None:
    """The first of its kind in a worker's log."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return next((event for event in events if event["event"] == kind), None)


if __name__ == "__main__":
    main()
