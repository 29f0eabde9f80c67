"""Somebody attacks real workers, one attack after another: what happens, memory, rounds.

    python -m tests.lab hostile [--workers 3] [--seconds 8] [--per-s 10] [--only NAME]
    python -m tests.lab hostile --insecure    # in a run without certificates

An encrypted run is attacked by a stranger first, who has no certificate of it, and then by a member
that has. Then so is one whose model is in two stages. One line an attack: the resident memory of
the attacked worker before and after, rounds per 10 s before, during and after, and what came of it.
The steps of the workers have a pause each, so that rounds come at a pace that does not depend on
how busy the machine is. Rows are marked where there were fewer than 90 % of the rounds before and
after.

The last line is the verdict. The exit code is 1 if a process ended, if something of the attacker's
was taken, if a stranger was answered, or if a row is marked.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.attacker import AT_THE_HANDSHAKE, Attack, Harm, Target, aiming, attacked
from tests.support.attacks import ATTACKS, CONNECTIONS
from tests.support.attacks_on_stages import ON_STAGES, STAGES
from tests.support.members import coordinated_swarm, resident_mib
from tests.support.workers import QUICK, SMALL, Swarm, settings_of

ENOUGH = 0.9
PAUSE_S, STEPS = 0.1, 4
PACED = settings_of(
    task__name="tests.support.slow_task:SlowBytes",
    task__pause_s=PAUSE_S,
    run__steps=2_000_000,
    diloco__inner_steps=STEPS,
)
# Each of the four microbatches of a step has a pause.
BRISK = settings_of(task__pause_s=PAUSE_S / 4, diloco__inner_steps=1)


class Table:
    """Attacks a swarm, and prints a line for each attack."""

    def __init__(self, swarm: Swarm, seconds: float, per_s: float) -> None:
        self._swarm, self._seconds, self._per_s = swarm, seconds, per_s
        self.harmed: list[str] = []
        self.slowed: list[str] = []
        self._quiet = self._rounds_per_10_s()

    @property
    def ended(self) -> list[str]:
        """Processes that are no more."""
        workers = self._swarm.workers.items()
        return [name for name, worker in workers if worker.process.poll() is not None]

    def attack(self, who: str, name: str, attack: Attack, target: Target, *, calls: bool) -> None:
        """One attack. Args: calls: whether a stranger must be refused at the handshake."""
        before, began, counted = resident_mib(self._swarm), time.monotonic(), self._rounds()
        try:
            outcome = attacked(target, attack, self._times())
            if target.known is not None and calls and outcome != AT_THE_HANDSHAKE:
                raise Harm(f"a stranger was answered: {outcome}")
        except Harm as error:
            outcome = f"HARM: {error}"
        during = 10 * (self._rounds() - counted) / (time.monotonic() - began)
        if ended := self.ended:
            last = "".join(self._swarm.workers[each].errors[-2000:] for each in ended)
            outcome = f"HARM: ended {ended} {last}"
        if outcome.startswith("HARM"):
            self.harmed.append(f"{name} ({who})")
        after = 0.0 if ended else self._rounds_per_10_s()
        if slow := during < ENOUGH * statistics.mean((self._quiet, after)):
            self.slowed.append(f"{name} ({who})")
        memory = "" if ended else f"{before:.0f} -> {resident_mib(self._swarm):.0f}"
        pace = f"{self._quiet:.0f} {during:.0f} {after:.0f}"
        marked = " (slow)" if slow else ""
        print(f"{who:8} {name:36} {memory:>11} {pace:>12}  {outcome}{marked}", flush=True)
        self._quiet = after

    def verdict(self) -> int:
        """Prints it. Returns the exit code."""
        none = "none: nobody ended, nothing of the attacker was taken"
        print(
            f"harm: {', '.join(self.harmed) or none}; "
            f"fewer than {ENOUGH:.0%} of the rounds: {', '.join(self.slowed) or 'in no row'}"
        )
        return 1 if self.harmed or self.slowed else 0

    def _times(self) -> Iterator[None]:
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            yield
            time.sleep(1 / self._per_s)  # so many attacks a second

    def _rounds(self) -> int:
        return len(self._swarm.workers[self._swarm.names[0]].of("round"))

    def _rounds_per_10_s(self) -> float:
        began, counted = time.monotonic(), self._rounds()
        time.sleep(self._seconds)  # the rounds of this time are counted
        return 10 * (self._rounds() - counted) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="before, during and after each attack"
    )
    parser.add_argument("--per-s", type=float, default=10.0, help="calls of the attacker")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--insecure", action="store_true", help="nobody has a certificate")
    options = parser.parse_args()
    print(f"{'who':8} {'attack':36} {'MiB':>11} {'rounds/10 s':>12}  what happened", flush=True)
    code = attack_all(options, ATTACKS | CONNECTIONS, options.workers)
    if options.insecure:
        return code  # anybody may report on another's iteration
    return max(code, attack_all(options, ON_STAGES, 2, *STAGES, *BRISK, staged=True))


def attack_all(
    options: argparse.Namespace,
    attacks: Mapping[str, Attack],
    workers: int,
    *settings: str,
    staged: bool = False,
) -> int:
    """Attacks a swarm of its own, in all of these ways. Returns the exit code."""
    attacks = {name: each for name, each in attacks.items() if options.only in name}
    if not attacks:
        return 0
    used, encrypted = (*SMALL, *QUICK, *PACED, *settings), not options.insecure
    with (
        tempfile.TemporaryDirectory() as folder,
        coordinated_swarm(
            workers, Path(folder), *used, encrypted=encrypted, staged=staged
        ) as found,
    ):
        swarm = found[0]
        swarm.workers["w0"].wait_for_round(3)
        table = Table(swarm, options.seconds, options.per_s)
        for who in ("anybody",) if options.insecure else ("stranger", "member"):
            for turn, (name, attack) in enumerate(attacks.items()):
                if table.ended:
                    continue
                with aiming(*found, stranger=who == "stranger", turn=turn) as target:
                    table.attack(who, name, attack, target, calls=name not in CONNECTIONS)
        return table.verdict()


if __name__ == "__main__":
    raise SystemExit(main())
