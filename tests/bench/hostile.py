"""A stranger attacks real workers, one attack after another: what happens, memory, rounds.

    python tests/bench/hostile.py [--workers 3] [--seconds 5] [--per-s 10] [--only NAME]

One line an attack: what came of it, the resident memory of the attacked worker before and after,
rounds per 10 s before and during. Fails if a worker ends, or takes over a state of the stranger's.
Rounds are marked where they fall below 90 %: on a busy machine, measure again.
"""

import argparse
import tempfile
import time
from pathlib import Path

import grpc

from tests.support.attacks import ATTACKS, Target
from tests.support.stranger import calling
from tests.support.workers import QUICK, SMALL, Swarm, running_swarm, settings_of

ENOUGH = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="before, and during, each attack"
    )
    parser.add_argument("--per-s", type=float, default=10.0, help="calls of the stranger")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    options = parser.parse_args()
    settings = [*SMALL, *QUICK, *settings_of(run__steps=2_000_000, diloco__inner_steps=20)]
    harmed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_swarm(options.workers, Path(folder), *settings) as swarm,
    ):
        swarm.start_all()
        swarm.workers["w0"].wait_for_round(3)
        print(f"{'attack':36} {'MiB':>11} {'rounds/10 s':>13}  what happened", flush=True)
        for name, attack in ATTACKS.items():
            if options.only not in name:
                continue
            quiet = rounds_per_10_s(swarm, options.seconds)
            before = resident_mib(swarm)
            with calling(swarm.addresses["w0"]) as stranger:
                target = Target(swarm, stranger, stranger.manifest())
                with attack(target) as once:
                    began, counted = time.monotonic(), rounds(swarm)
                    while (elapsed_s := time.monotonic() - began) < options.seconds:
                        try:
                            outcome = once()
                        except grpc.RpcError as error:
                            code = error.code()  # type: ignore[attr-defined]  # not in its stubs
                            outcome = f"no answer: {code.name}"
                        time.sleep(1 / options.per_s)
                    during = 10 * (rounds(swarm) - counted) / elapsed_s
            ended = [each for each, w in swarm.workers.items() if w.process.poll() is not None]
            adopted = [each for each, w in swarm.workers.items() if adopts(w.of("adopted"))]
            if ended or adopted:
                harmed += 1
                outcome = f"HARM: ended {ended}, adopted {adopted}"
            slow = "" if during >= ENOUGH * quiet else " (slow)"
            memory = f"{before:.0f} -> {resident_mib(swarm):.0f}"
            pace = f"{quiet:.0f} -> {during:.0f}"
            print(f"{name:36} {memory:>11} {pace:>13}  {outcome}{slow}", flush=True)
    return 1 if harmed else 0


def adopts(events: list[dict[str, object]]) -> bool:
    """Whether a state of the stranger's was taken; workers may take each other's."""
    return any(not str(event["donor"]).startswith("w") for event in events)


def rounds(swarm: Swarm) -> int:
    """That the attacked worker has applied."""
    return len(swarm.workers["w0"].of("round"))


def rounds_per_10_s(swarm: Swarm, seconds: float) -> float:
    began, counted = time.monotonic(), rounds(swarm)
    time.sleep(seconds)
    return 10 * (rounds(swarm) - counted) / (time.monotonic() - began)


def resident_mib(swarm: Swarm) -> float:
    """Of the attacked worker."""
    status = Path(f"/proc/{swarm.workers['w0'].process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    raise SystemExit(main())
