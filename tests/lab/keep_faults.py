"""What faults cost where replicas keep what they have not sent: the loss beside no fault.

    python -m tests.lab keep-faults [--preset onebit ...] [--steps 600] [--link 20mbit]

Five swarms of four `murmur` workers, one after another, behind the relay. In one nothing happens.
In the others, when w3 has applied a third of its rounds, it is

    kill -9       killed, for good: the others go on without it
    resume        killed, and started again by the same command, from its checkpoint
    a cut link    cut off from w0 until it has applied two thirds of its rounds
    late          or it comes only when the others have applied a third of theirs

The loss is that of the model that all agree on in the end. Exits with 1 if a loss is more than 1 %
from that of the undisturbed swarm, or if models differ. Prints Markdown.
"""

import argparse
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.worker.config import load_config
from tests.support.shaped import relayed_swarm
from tests.support.workers import (
    QUICK,
    Event,
    Hashes,
    WorkerProcess,
    free_addresses,
    settings_of,
)

NEAR = 0.01
RUN_S = 900.0  # none takes longer
VICTIM, SURVIVORS = "w3", ("w0", "w1", "w2")
NOTHING, KILL, RESUME, CUT, LATE = FAULTS = ("nothing", "kill -9", "resume", "a cut link", "late")


@dataclass(frozen=True)
class Asked:
    """What all swarms of a table have in common. Args: rounds: of a fragment, in the whole run."""

    preset: str
    settings: tuple[str, ...]
    link: str
    rounds: int


def main() -> int:
    """Prints a table for each preset; 1 where a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", help="onebit by default")
    parser.add_argument("--fault", action="append", choices=FAULTS[1:], help="all by default")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--link", default="20mbit")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    faults = (NOTHING, *(options.fault or FAULTS[1:]))
    good = True
    for preset in options.preset or ["onebit"]:
        given = settings_of(run__steps=options.steps, checkpoint__every_s=2.0)
        more = (word for each in options.settings for word in ("--set", each))
        settings = (*QUICK, *given, *more)
        period = load_config(None, settings[1::2], preset).plan.inner_steps
        asked = Asked(preset, settings, options.link, options.steps // period)
        print(
            f"`{preset}`, {options.steps} steps, {options.link}\n\n"
            "| fault | validation loss | beside nothing | rounds failed | states taken over |\n"
            "| --- | ---: | ---: | ---: | ---: |",
            flush=True,
        )
        good &= told(asked, faults)
    return 0 if good else 1


def told(asked: Asked, faults: Sequence[str]) -> bool:
    """Trains and prints a row for each fault; False where a claim fails."""
    undisturbed, good = 0.0, True
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            results = outcome(asked, fault, Path(folder))
        loss = max(float(result["val_loss"]) for result in results.values())
        undisturbed = undisturbed or loss
        beside = loss / undisturbed - 1
        failed, adoptions = (
            sum(int(result[key]) for result in results.values())
            for key in ("rounds_failed", "adoptions")
        )
        alike = len({Hashes.of(result) for result in results.values()}) == 1
        good &= alike and abs(beside) <= NEAR
        row = [fault, f"{loss:.3f}", f"{100 * beside:+.2f} %", failed, adoptions]
        print(f"| {' | '.join(map(str, row))} |" + ("" if alike else " models differ"), flush=True)
    return good


def outcome(asked: Asked, fault: str, out: Path) -> Mapping[str, Event]:
    """The results of those that are there in the end."""
    third, count = asked.rounds // 3, 3 if fault == LATE else 4
    newcomer = {VICTIM: free_addresses(1)[0]} if fault == LATE else {}
    words = ("--preset", asked.preset, *asked.settings)
    with relayed_swarm(count, out, asked.link, words, newcomer) as (swarm, relay):
        if fault == LATE:
            swarm.workers[SURVIVORS[0]].wait_for_round(third)
            where = ("--proxy", relay.proxies[VICTIM], "--listen", newcomer[VICTIM])
            swarm.join(VICTIM, swarm.addresses[SURVIVORS[0]], *where)
        elif fault != NOTHING:
            victim = swarm.workers[VICTIM]
            victim.wait_for_round(third)
            if fault == CUT:
                relay.cut(VICTIM, SURVIVORS[0])
                victim.wait_for_round(2 * third)
                relay.heal()
            else:
                kill(victim)
            if fault == RESUME:
                swarm.start(VICTIM, "--proxy", relay.proxies[VICTIM])
        alive = SURVIVORS if fault == KILL else (*SURVIVORS, VICTIM)
        return swarm.wait(*alive, patience_s=RUN_S)


def kill(victim: WorkerProcess) -> None:
    victim.send(signal.SIGKILL)
    victim.wait()


if __name__ == "__main__":
    raise SystemExit(main())
