"""The common part of compose-test and swarm-stack-test: image, containers, what must come out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import Failure, run, say, wait_until
from offline import can_pull, collect_wheels, make_base_image, reaches

REPOSITORY = Path(__file__).resolve().parent.parent
COMPOSE_FILE = REPOSITORY / "deploy" / "compose.yaml"
KILL_AFTER_ROUNDS = 2
BUILD_TIMEOUT_S = 1200

# Milliseconds a step: containers matter here, not the model. Most rounds are after the kill.
SHORT_RUN = {
    "PRESET": "diloco",
    "MODEL": "tiny",
    "STEPS": "6000",
    "INNER_STEPS": "50",
    "SEED": "0",
    "MURMUR_ARGS": "--set task.batch_size=2 --set task.context_bytes=32",
}


def build(compose: Sequence[str], workers: int) -> dict[str, str]:
    """Makes the image, with the build arguments' defaults where they work, a local base and wheels
    elsewhere. Returns the variables of compose.yaml."""
    began = time.monotonic()
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim")
    index = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    pulled = can_pull(base)
    if not pulled and "BASE_IMAGE" in os.environ:
        raise Failure(f"the base image {base} is neither on the engine nor in its registry")
    if not pulled:
        base = make_base_image()
    if not pulled or not reaches(index):
        collect_wheels(REPOSITORY)
    settings = SHORT_RUN | {key: os.environ[key] for key in SHORT_RUN if key in os.environ}
    settings |= {"BASE_IMAGE": base, "TORCH_INDEX": index, "IMAGE": "murmuration:test"}
    settings["WORKERS"] = str(workers)
    command = [*compose, "-f", str(COMPOSE_FILE), "build", "coordinator"]
    run(command, timeout_s=BUILD_TIMEOUT_S, env=os.environ | settings)
    say(f"image ready in {time.monotonic() - began:.1f} s, base {base}")
    return settings


def containers(*labels: str, running: bool = False) -> list[str]:
    """The ids of those that have all these labels."""
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    shown = [] if running else ["--all"]
    command = ["docker", "ps", *shown, "--quiet", "--no-trunc", *filters]
    return run(command, timeout_s=30).stdout.split()


def inspect(container: str, template: str) -> str:
    """Asks the engine about a container."""
    command = ["docker", "inspect", "--format", template, container]
    return run(command, timeout_s=30).stdout.strip()


def kill_worker(container: str) -> None:
    """SIGKILL to the worker in a container, as from a kernel that is out of memory. (`docker kill`
    would count as a wish that it stays away.)"""
    command = "kill -9 $(cat /proc/1/task/1/children)"
    run(["docker", "exec", "--user", "murmur", container, "sh", "-c", command], timeout_s=60)


def rounds(coordinator: str) -> int:
    """Completed ones, by the versions that workers have told the coordinator; 0 while it does not
    answer."""
    command = ["docker", "exec", coordinator, "murmur", "status", "127.0.0.1:7600", "--json"]
    asked = run(command, timeout_s=30, check=False)
    try:
        members = json.loads(asked.stdout)["members"]
        return max((sum(member["versions"]) for member in members), default=0)
    except (ValueError, KeyError, TypeError):
        return 0


def wait_for_rounds(coordinator: Callable[[], str], *, timeout_s: float) -> int:
    """Until some are completed; returns how many."""
    seen = 0

    def under_way() -> bool:
        nonlocal seen
        seen = rounds(coordinator())
        return seen >= KILL_AFTER_ROUNDS

    if not wait_until(under_way, timeout_s=timeout_s, every_s=1):
        raise Failure(f"no {KILL_AFTER_ROUNDS} rounds within {timeout_s:.0f} s")
    return seen


def wait_for_report(anyone: Callable[[], str], *, timeout_s: float) -> dict[str, Any]:
    """The report, once a worker has written it to the volume that all containers share."""
    report: dict[str, Any] = {}

    def written() -> bool:
        command = [
            "docker",
            "exec",
            anyone(),
            "sh",
            "-c",
            "cat $(ls /out/*/report.json | head -n 1)",
        ]
        with contextlib.suppress(ValueError, Failure):
            report.update(json.loads(run(command, timeout_s=30).stdout))
        return bool(report)

    if not wait_until(written, timeout_s=timeout_s, every_s=1):
        raise Failure(f"the run is not over after {timeout_s:.0f} s")
    return report


def check(report: dict[str, Any], workers: int, rounds_at_kill: int) -> None:
    """Raises with every expectation that was not met: all came to the end with the same model, the
    one that was killed too."""
    peers = report["peers"]
    faults = []
    if report["workers"] != workers or len(peers) != workers:
        faults.append(f"the report counts {report['workers']} workers and lists {len(peers)}")
    if lost := [peer["peer"] for peer in peers if peer["exit_code"] != 0]:
        faults.append(f"lost: {', '.join(lost)}")
    if report["rounds_completed"] <= rounds_at_kill:
        faults.append(f"no round was completed after the kill ({rounds_at_kill} before it)")
    for key in ("anchor_hash", "momentum_hash"):
        hashes = {peer[key] for peer in peers}
        if len(hashes) != 1 or not all(hashes):
            faults.append(f"the workers' {key} differ or are missing: {hashes}")
    if faults:
        raise Failure("\n      ".join(faults))


def show(report: dict[str, Any], rounds_at_kill: int, wall_s: float) -> None:
    """Prints the figures."""
    after = report["rounds_completed"] - rounds_at_kill
    say(f"trained in {wall_s:.1f} s from the start to the report")
    say(
        f"{report['preset']}: {report['params']:,} parameters, {report['steps']} steps, "
        f"val_loss {report['val_loss']:.4f}"
    )
    say(
        f"rounds: {report['rounds_completed']} completed ({rounds_at_kill} before the kill, "
        f"{after} after it), {report['rounds_failed']} failed; "
        f"compute utilization {report['compute_utilization']:.1%}"
    )
    for peer in sorted(report["peers"], key=lambda peer: str(peer["peer"])):
        say(
            f"  {peer['peer']}: step {peer['steps']}, sent {_mb(peer['bytes_sent'])}, "
            f"received {_mb(peer['bytes_received'])}, exit {peer['exit_code']}, "
            f"anchor {_short(peer['anchor_hash'])}, momentum {_short(peer['momentum_hash'])}"
        )


def _mb(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.1f} MB"


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "-"


def verdict(test: Callable[[], None]) -> int:
    """Runs a test, prints PASS or FAIL last. Returns the exit status: 0 passed, 1 failed, 130
    interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        test()
    except Failure as failure:
        say(f"FAIL: {failure}")
        return 1
    except KeyError as missing:
        say(f"FAIL: the report has no {missing}")
        return 1
    except KeyboardInterrupt:
        say("FAIL: interrupted")
        return 130
    say("PASS")
    return 0
