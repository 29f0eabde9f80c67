"""Faults in the midst of a round in pairs: what they cost the others, and what the loss.

    python -m tests.lab pair-faults [--preset noloco ...] [--steps 560] [--stop-s 60]

Four workers of `murmur` behind the relay, on 20 Mbit/s each, beside three more such swarms: in one
nothing happens, in the others w2 is killed, stopped for a minute, or cut off from its partner for
good, just while it gives its part to the partner in round 1 (the stopped one, when only its last
word is missing). A batch takes a pause, so that swarms side by side do not slow each other down.
Exits with 1 if anything was applied twice or mixed, a worker that was not in that round stood
still while the fault lasted, models differ in the end, or a loss is more than 3 % above that of
the undisturbed swarm.
"""

import argparse
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from murmuration.worker.config import load_config
from tests.support.held_rounds import held_round
from tests.support.pair_accounts import PairAccounts
from tests.support.shaped import relayed_swarm
from tests.support.watched import program
from tests.support.workers import Event, Hashes, Swarm, settings_of

LINK, WORSE, HELD_ROUND = "20mbit", 1.03, 1
RUN_S = 600.0  # none takes longer
VICTIM, SURVIVORS = "w2", ("w0", "w1", "w3")
NOTHING, KILL, STOP, CUT = FAULTS = ("nothing", "kill -9", "SIGSTOP", "a cut link")


@dataclass(frozen=True)
class Outcome:
    """Args:
    results: of whoever was there in the end.
    partner: of the victim, in the round with the fault; empty without one.
    meanwhile: rounds that each of the two others has completed while it lasted.
    lasted_s: to the end of the run, if it did not end before.
    """

    accounts: PairAccounts
    results: Mapping[str, Event]
    partner: str = ""
    meanwhile: Sequence[int] = ()
    lasted_s: float = 0.0

    @property
    def val_loss(self) -> float:
        return max(float(result["val_loss"]) for result in self.results.values())

    @property
    def hashes(self) -> set[Hashes]:
        return {Hashes.of(result) for result in self.results.values()}

    def lost(self, due: int, *peers: str) -> int:
        """Rounds of the schedule that these have not applied, all together."""
        return sum(due - len(self.accounts.applied(peer)) for peer in peers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", help="noloco by default")
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--pause-s", type=float, default=0.15)
    parser.add_argument("--stop-s", type=float, default=60.0)
    options = parser.parse_args()
    print(
        "| preset | fault | lasted | meanwhile, rounds of the two others | of each worker's "
        "| lost by the partner | by the others | by the victim | applied by one only "
        "| applied twice or mixed | validation loss | above the undisturbed |\n"
        "| --- | --- |" + 10 * " ---: |"
    )
    good = True
    for preset in options.preset or ["noloco"]:
        settings = settings_of(
            run__steps=options.steps,
            task__name="tests.support.slow_task:SlowBytes",
            task__pause_s=options.pause_s,
        )
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(FAULTS)) as pool:
            run = partial(outcome, Path(folder), preset, settings, options.stop_s)
            outcomes = dict(zip(FAULTS, pool.map(run, FAULTS), strict=True))
            good &= told(preset, outcomes)
    return 0 if good else 1


def outcome(out: Path, preset: str, settings: Sequence[str], stop_s: float, fault: str) -> Outcome:
    """Trains to the end, with the fault."""
    folder = out / fault.replace(" ", "-")
    folder.mkdir()
    plan = load_config(None, settings[1::2], preset).plan
    accounts = folder / "accounts"
    point = "staged" if fault == STOP else "contribution"
    with held_round(folder, HELD_ROUND, point) as held:
        programs = {name: program(accounts / name) for name in SURVIVORS}
        programs[VICTIM] = program(accounts / VICTIM, None if fault == NOTHING else held.hold)
        asked = ("--preset", preset, *settings)
        with relayed_swarm(4, folder, LINK, asked, programs=programs) as (swarm, relay):
            if fault == NOTHING:
                results = swarm.wait(patience_s=RUN_S)
                return Outcome(PairAccounts(accounts, plan), results)
            partner = held.partner()
            others = [name for name in SURVIVORS if name != partner]
            began_s, before = time.monotonic(), rounds_of(swarm, others)
            victim, alive = swarm.workers[VICTIM], [*SURVIVORS, VICTIM]
            if fault == KILL:
                victim.send(signal.SIGKILL)
                alive.remove(VICTIM)
            elif fault == CUT:
                relay.cut(VICTIM, partner)
            else:
                victim.send(signal.SIGSTOP)
                time.sleep(stop_s)  # how long it is stopped is the fault
            after, lasted_s = rounds_of(swarm, others), time.monotonic() - began_s
            with held.gate.opened():
                if fault == STOP:
                    victim.send(signal.SIGCONT)
                results = swarm.wait(*alive, patience_s=RUN_S)
            if fault != STOP:
                after, lasted_s = rounds_of(swarm, others), time.monotonic() - began_s
            meanwhile = [after[name] - before[name] for name in others]
    return Outcome(PairAccounts(accounts, plan), results, partner, meanwhile, lasted_s)


def rounds_of(swarm: Swarm, names: Sequence[str]) -> dict[str, int]:
    """How many these have completed so far, without the pass over all in the end."""
    return {
        name: sum(event["contributors"] <= 2 for event in swarm.workers[name].of("round"))
        for name in names
    }


def told(preset: str, outcomes: Mapping[str, Outcome]) -> bool:
    """Prints what has become of a preset's swarms; False where a claim fails."""
    undisturbed, good = outcomes[NOTHING], True
    due = max(len(undisturbed.accounts.applied(name)) for name in SURVIVORS)
    for fault, each in outcomes.items():
        others = [name for name in SURVIVORS if name != each.partner]
        wrong = len(each.accounts.twice()) + len(each.accounts.mixed())
        above = each.val_loss / undisturbed.val_loss
        good &= not wrong and above <= WORSE and len(each.hashes) == 1
        good &= fault == NOTHING or min(each.meanwhile) > 0
        cells = [
            f"`{preset}`",
            fault,
            f"{each.lasted_s:.0f} s" if each.partner else "-",
            ", ".join(map(str, each.meanwhile)) or "-",
            due,
            each.lost(due, each.partner) if each.partner else "-",
            each.lost(due, *others),
            "-" if fault == KILL else each.lost(due, VICTIM),
            len(each.accounts.by_one_only()),
            wrong,
            f"{each.val_loss:.3f}",
            f"{100 * (above - 1):+.1f} %",
        ]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return good


if __name__ == "__main__":
    raise SystemExit(main())
