"""Stands in for `murmur up`: says what a worker says, and fails where `--set fake.*` asks for it.

It holds a lock on OUT/lock while it lives, so that a test can wait for its end without asking when.

    --set fake.wait=1          trains until Ctrl-C
    --set fake.pipe=PATH       w0 opens this pipe once it trains, and waits for a reader
    --set fake.deaf=w1         that one does not hear Ctrl-C
    --set fake.dies=w1         that one is killed while training
    --set fake.crash=w1        that one ends with a traceback before training
    --set fake.error=w1        that one ends with exit code 4 and one line before training
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from pathlib import Path

BEGAN_S = time.monotonic()


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("command", choices=["up"])
    parser.add_argument("config", nargs="?")
    for name in (
        "--name", "--listen", "--out", "--min-peers", "--preset", "--steps", "--inner-steps",
        "--threads",
    ):  # fmt: skip
        parser.add_argument(name)
    for name in ("--join", "--set"):
        parser.add_argument(name, action="append", default=[])
    for name in ("--json", "--no-report", "--resume", "--fresh"):
        parser.add_argument(name, action="store_true")
    asked = parser.parse_args()
    settings, out = dict(setting.split("=", 1) for setting in asked.set), Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    # The kernel lets it go, once the exit code is there.
    fcntl.flock(os.open(out / "lock", os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)
    (out / "pid").write_text(str(os.getpid()))
    steps = int(asked.steps or settings.get("run.steps", 20))
    return run(asked.name, asked.listen, settings, len(asked.join) + 1, steps)


def run(name: str, listen: str, settings: dict[str, str], workers: int, steps: int) -> int:
    stopped, deaf = threading.Event(), settings.get("fake.deaf") == name
    signal.signal(signal.SIGINT, lambda *_: None if deaf else stopped.set())
    if settings.get("fake.error") == name:
        print("murmur: no text at /nowhere; name a file with --text", file=sys.stderr, flush=True)
        return 4
    say(name, "listening", address=listen, pid=os.getpid())
    if settings.get("fake.crash") == name:
        raise RuntimeError("a defect")
    if "fake.error" in settings or "fake.crash" in settings:
        stopped.wait()  # as the others do, until enough peers are there
    say(name, "started", group=[f"w{i}" for i in range(workers)], step=0)
    for step in range(1, steps + 1):
        moved, loss = {"bytes_sent": 1000 * step, "bytes_received": 900 * step}, 5.0 / step
        told = {"step": step, "steps": steps, "loss": loss, "round": step, "state": "training"}
        say(name, "progress", **told, **moved)
        say(name, "round", fragment=0, round=step, contributors=workers, stall_s=0.0)
    if settings.get("fake.dies") == name:
        os.kill(os.getpid(), signal.SIGKILL)
    if "fake.pipe" in settings and name == "w0":
        Path(settings["fake.pipe"]).open("w").close()
    if "fake.wait" in settings:
        say(name, "warning", text="waits")
        while not stopped.wait(0.05):
            pass
    reason = "interrupted" if stopped.is_set() else "finished"
    say(name, "result", **result(steps, reason))
    return 130 if stopped.is_set() else 0


def result(steps: int, reason: str) -> dict[str, object]:
    finished = reason == "finished"
    return {
        "step": steps, "steps": steps, "tokens": 64 * steps, "params": 165, "preset": "diloco",
        "bytes_sent": 1000 * steps, "bytes_received": 900 * steps,
        "payload_bytes_sent": 990 * steps, "payload_bytes_received": 890 * steps,
        "ddp_bytes": 50_000 * steps, "anchor_hash": "aa" * 16, "momentum_hash": "bb" * 16,
        "rounds_completed": steps, "rounds_failed": 0, "inner_steps": 1, "seed": 0,
        "compute_s": 9.0, "stall_s": 0.5, "wall_s": 10.0, "compute_utilization": 0.9,
        "val_loss": 1.5 if finished else None, "loss_unit": "nats per byte",
        "train_loss_curve": [[step, 5.0 / step] for step in range(1, steps + 1)],
        "sample": "def f():\n    return 1\n" if finished else None,
        "checkpoint": "somewhere", "reason": reason,
        "loop_lag_ms": {"p50": 0.1, "p99": 1.0, "max": 2.0},
    }  # fmt: skip


def say(peer: str, kind: str, **fields: object) -> None:
    event = {"event": kind, "peer": peer, "time_s": time.monotonic() - BEGAN_S, **fields}
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
