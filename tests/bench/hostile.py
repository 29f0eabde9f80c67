"""Somebody attacks real workers, one attack after another: what happens, memory, rounds.

    python tests/bench/hostile.py [--workers 3] [--seconds 8] [--per-s 10] [--only NAME]
    python tests/bench/hostile.py --member      # one with a certificate, in an encrypted run
    python tests/bench/hostile.py --stranger    # one without, in an encrypted run

One line an attack: the resident memory of the attacked worker before and after, rounds per 10 s
before, during and after, and what came of it. The steps of the workers have a pause each, so that
rounds come at a pace that does not depend on how busy the machine is. Rows are marked where there
were fewer than 90 % of the rounds before and after.

The last line is the verdict. The exit code is 1 if a worker ended, if one took over a state of the
attacker's, if somebody without a certificate was answered, or if a row is marked.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from protos.identity import Identity
from tests.support.attacks import ATTACKS, STRANGERS, Attack, Target
from tests.support.members import certified_swarm, resident_mib
from tests.support.stranger import calling
from tests.support.workers import QUICK, SMALL, Swarm, running_swarm, settings_of

ENOUGH = 0.9
PAUSE_S, STEPS = 0.1, 4
PACED = settings_of(
    task__name="tests.support.slow_task:SlowBytes",
    task__pause_s=PAUSE_S,
    run__steps=2_000_000,
    diloco__inner_steps=STEPS,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="before, during and after each attack"
    )
    parser.add_argument("--per-s", type=float, default=10.0, help="calls of the attacker")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--member", action="store_true", help="the attacker has a certificate")
    parser.add_argument("--stranger", action="store_true", help="the run is encrypted, and it not")
    options = parser.parse_args()
    attacks = STRANGERS if options.stranger else ATTACKS
    harmed: list[str] = []
    slowed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, _swarm(options, Path(folder)) as (swarm, member):
        swarm.start_all()
        swarm.workers["w0"].wait_for_round(3)
        print(f"{'attack':36} {'MiB':>11} {'rounds/10 s':>15}  what happened", flush=True)
        quiet = _rounds_per_10_s(swarm, options.seconds)
        for name, attack in attacks.items():
            if options.only not in name:
                continue
            before = resident_mib(swarm)
            during, outcome = _attacked(swarm, member, attack, options)
            ended = [each for each, w in swarm.workers.items() if w.process.poll() is not None]
            adopted = [each for each, w in swarm.workers.items() if adopts(w.of("adopted"))]
            if ended or adopted:
                last = "".join(swarm.workers[each].errors[-2000:] for each in ended)
                outcome = f"HARM: ended {ended}, adopted {adopted} {last}"
            if outcome.startswith("HARM"):
                harmed.append(name)
            if ended:
                print(f"{name:36} {outcome}", flush=True)
                break
            after = _rounds_per_10_s(swarm, options.seconds)
            slow = "" if during >= ENOUGH * statistics.mean((quiet, after)) else " (slow)"
            if slow:
                slowed.append(name)
            memory = f"{before:.0f} -> {resident_mib(swarm):.0f}"
            pace = f"{quiet:.0f} {during:.0f} {after:.0f}"
            print(f"{name:36} {memory:>11} {pace:>15}  {outcome}{slow}", flush=True)
            quiet = after
    print(
        f"harm: {', '.join(harmed) or 'none: nobody ended, nothing of the attacker was adopted'}; "
        f"fewer than {ENOUGH:.0%} of the rounds: {', '.join(slowed) or 'in no row'}"
    )
    return 1 if harmed or slowed else 0


@contextmanager
def _swarm(options: argparse.Namespace, out: Path) -> Iterator[tuple[Swarm, Identity | None]]:
    settings = [*SMALL, *QUICK, *PACED]
    if options.stranger:
        with certified_swarm(options.workers, out, *settings) as (swarm, _):
            yield swarm, None
        return
    if options.member:
        with certified_swarm(options.workers, out, *settings, members=["mallory"]) as found:
            yield found[0], found[1][0]
        return
    with running_swarm(options.workers, out, *settings) as swarm:
        yield swarm, None


def _attacked(
    swarm: Swarm, member: Identity | None, attack: Attack, options: argparse.Namespace
) -> tuple[float, str]:
    """Rounds per 10 s while it is attacked, and what came of it."""
    outcome = ""
    with (
        calling(swarm.addresses["w0"], member) as stranger,
        attack(Target(swarm, stranger, member)) as once,
    ):
        began, counted = time.monotonic(), rounds(swarm)
        while time.monotonic() - began < options.seconds:
            try:
                outcome = once()
            except grpc.RpcError as error:
                outcome = f"refused: {error.details()}"  # type: ignore[attr-defined]  # as above
            time.sleep(1 / options.per_s)
        return 10 * (rounds(swarm) - counted) / (time.monotonic() - began), outcome


def adopts(events: list[dict[str, object]]) -> bool:
    """Whether a state of the stranger's was taken; workers may take each other's."""
    return any(not str(event["donor"]).startswith("w") for event in events)


def rounds(swarm: Swarm) -> int:
    """That the attacked worker has applied."""
    return len(swarm.workers["w0"].of("round"))


def _rounds_per_10_s(swarm: Swarm, seconds: float) -> float:
    began, counted = time.monotonic(), rounds(swarm)
    time.sleep(seconds)
    return 10 * (rounds(swarm) - counted) / (time.monotonic() - began)


if __name__ == "__main__":
    raise SystemExit(main())
