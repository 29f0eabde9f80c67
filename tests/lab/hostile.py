"""Somebody attacks real workers, one attack after another: what happens, memory, rounds.

    python -m tests.lab hostile [--workers 3] [--seconds 8] [--per-s 10] [--only NAME]
    python -m tests.lab hostile --insecure    # in a run without certificates

An encrypted run is attacked by a stranger, then by a member, then by a member in two stages. A line
has the memory of the attacked worker, rounds per 10 s before, during and after, and what happened.
Steps have a pause each, so that the pace of rounds does not depend on how busy the machine is. Rows
are marked where there were fewer than 90 % of the rounds.

Then workers turn on three honest ones, each kind in a swarm of its own (tests/support/liar.py). A
row has the rounds per 10 s, how many took more than three times as long as is usual, when most had
named the liar, held-out loss and norm of the anchor beside a run whose fourth worker leaves, and
what was said first. It is marked where more than three rounds were slow or rounds do not come back;
where a state was taken; where the loss is more than 2 % higher, or the anchor half as large again,
or as small; or where one that is honest was named, or is in no round at the end.

The exit code is 1 if a process ended, something of the attacker's was taken, a stranger was
answered, or a row is marked.
"""

import argparse
import itertools
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.worker.training.checkpoint import load
from tests.support.attacker import AT_THE_HANDSHAKE, Attack, Harm, Target, aiming, attacked
from tests.support.attacks import ATTACKS, CONNECTIONS, HOLDING
from tests.support.attacks_on_stages import ON_STAGES, STAGES
from tests.support.liar import HONEST, INSIDERS
from tests.support.members import certified_swarm, coordinated_swarm, resident_mib
from tests.support.workers import QUICK, SMALL, Event, Swarm, WorkerProcess, at_s, settings_of

ENOUGH = 0.9
MOST_SLOW = 3  # rounds until a liar is left out
MOST_LOSS, MOST_NORM = 0.02, 1.5  # beside an honest run
PHASE_S, LEAST_S, MOST_S = 8.0, 12.0, 40.0  # before and after insiders turn; while they do
PAUSE_S, STEPS = 0.1, 4
PACED = settings_of(
    task__name="tests.support.slow_task:SlowBytes",
    task__pause_s=PAUSE_S,
    run__steps=2_000_000,
    diloco__inner_steps=STEPS,
)
# Each of the four microbatches of a step has a pause.
BRISK = settings_of(task__pause_s=PAUSE_S / 4, diloco__inner_steps=1)
# Of the runs in which insiders turn, by a part of the name of what they do.
OTHERWISE = {
    "lease": settings_of(task__data="leased"),
    "pairs": ("--preset", "noloco"),
    "kseed": ("--preset", "kseed", *settings_of(inner__warmup_steps=0)),
    "stages": (*STAGES, *BRISK),
    "trimmed": settings_of(rounds__aggregation="trimmed"),
}


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
    code = attack_all(options, ATTACKS | HOLDING | CONNECTIONS, options.workers)
    if options.insecure:
        return code  # anybody may report on another's iteration
    code = max(code, attack_all(options, ON_STAGES, 2, *STAGES, *BRISK, staged=True))
    return max(code, attack_inside(options.only))


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


@dataclass(frozen=True)
class Turned:
    """A run in which insiders have turned on the honest workers.

    Args:
        pace: rounds per 10 s before, during and after.
        slow: rounds afterwards that took more than three times as long as is usual.
        named: how many rounds and seconds later most honest workers had named one; None: never.
        said: how the first of them did.
        losses: held-out, of the honest workers' anchor, by step; norm: of that anchor at the end.
        harm: what must not be."""

    pace: tuple[float, float, float]
    slow: int
    named: tuple[int, float] | None
    said: str
    losses: dict[int, float]
    norm: float
    harm: str

    def row(self, name: str, left: "Turned") -> tuple[str, bool]:
        """A line of the table, and whether it is marked."""
        before, during, after = self.pace
        step = max(self.losses.keys() & left.losses.keys(), default=0)
        loss = self.losses[step] / left.losses[step] - 1 if step else 0.0
        norm = self.norm / left.norm
        held = loss <= MOST_LOSS and 1 / MOST_NORM < norm < MOST_NORM
        goes_on = self.slow <= MOST_SLOW and after + 10 / PHASE_S >= ENOUGH * before
        marked = bool(self.harm) or not (held and goes_on)
        named = "-" if self.named is None else f"{self.named[0]}, {self.named[1]:.0f} s"
        pace, said = f"{before:.0f}, {during:.0f}, {after:.0f}", self.harm or self.said
        said += " (marked)" if marked else ""
        return (
            f"| {name} | {pace} | {self.slow} | {named} | {loss:+.1%} | {norm:.2f} | {said} |",
            marked,
        )


def attack_inside(only: str) -> int:
    """Prints the table of insiders, and the verdict. Returns the exit code."""
    control, *kinds = INSIDERS
    if not (kinds := [kind for kind in kinds if only in kind]):
        return 0
    print(
        "\n| the fourth worker | rounds per 10 s | slow | named after | loss | anchor | they say |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    lefts, marked = dict[str, Turned](), list[str]()
    for kind in kinds:
        otherwise = next((each for each in OTHERWISE if each in kind), "")
        if otherwise not in lefts:
            left = lefts[otherwise] = turned(control, otherwise)
            print(left.row(f"{control} {otherwise}".strip(), left)[0], flush=True)
        row, wrong = turned(kind, otherwise).row(kind, lefts[otherwise])
        marked += [kind] * wrong
        print(row, flush=True)
    print(f"marked: {', '.join(marked) or 'no row'}")
    return int(bool(marked))


def turned(kind: str, otherwise: str = "") -> Turned:
    """Three honest workers, and an insider or two that turn on them after a while. In stages, who
    lies of losses is an origin; the anchor is that of an origin's stage."""
    liars, first = ["w3", "w4"][: 1 + kind.startswith("two")], int("loss" in kind)
    used = (*SMALL, *QUICK, *PACED, *OTHERWISE.get(otherwise, ()))
    if otherwise != "stages":  # these are evaluated at the end of a run alone
        used = (*used, *settings_of(run__evaluate_every=2 * STEPS))
    with (
        tempfile.TemporaryDirectory() as folder,
        certified_swarm(3 + len(liars), Path(folder), *used) as (swarm, _),
    ):
        swarm.programs |= dict.fromkeys(liars, ("tests.support.liar", kind))
        for number, name in enumerate(swarm.names):
            stage = ("--stage", str((number + first) % 2))
            swarm.start(name, "--threads", "1", *(stage if otherwise == "stages" else ()))
        honest = [swarm.workers[name] for name in swarm.names if name not in liars]
        for worker in honest:
            worker.wait_for_round(3)

        def found() -> list[list[Event]]:
            return [list(named_in(worker, liars, times[1])) for worker in honest]

        def most_have_named() -> bool:
            return 2 * sum(map(bool, found())) > len(honest)

        def pace(start_s: float, end_s: float) -> float:
            return 10 * sum(start_s <= each < end_s for each in rounds_s()) / (end_s - start_s)

        def rounds_s() -> list[float]:
            return [*map(at_s, honest[0].of("round"))]

        def passes(seconds: float) -> float:
            time.sleep(seconds)  # the rounds of this time are counted
            times.append(time.time())
            return pace(*times[-2:])

        times = [time.time()]
        paces = [passes(PHASE_S)]
        for name in liars:
            swarm.workers[name].send(signal.SIGUSR1)
        time.sleep(LEAST_S)  # a round or two with the liars
        while not most_have_named() and (now := time.time()) < times[1] + MOST_S:
            if pace(now - PHASE_S, now) >= ENOUGH * paces[0]:
                break  # nothing comes of it
            time.sleep(0.1)  # between two looks at the logs
        paces += [passes(0), passes(PHASE_S)]
        codes = [worker.process.poll() for worker in honest if worker.process.poll() is not None]
        for worker in honest:
            worker.send(signal.SIGTERM)
        left = [worker.wait() for worker in honest]
        codes += left if otherwise != "stages" else []  # a stage may be left alone at the end
        donors = {event["donor"] for worker in honest for event in worker.of("adopted")}
        harm = f"HARM: adopted of {donors}" if donors & {*liars} else ""
        harm = f"HARM: exit codes {codes} {honest[0].errors[-500:]}" if any(codes) else harm
        lasted_s = [(b, b - a) for a, b in itertools.pairwise([*rounds_s(), times[-1]])]
        usual_s = statistics.median(each for end, each in lasted_s if end < times[1])
        if kind in HONEST and (most_have_named() or honest[0].of("round")[-1]["contributors"] < 4):
            harm = harm or "HARM: one that is honest is named, or is in no round"
        words = sorted((events[0] for events in found() if events), key=at_s)
        named_s = at_s(words[len(honest) // 2]) if most_have_named() else 0.0
        between = sum(times[1] <= each < named_s for each in rounds_s())
        anchor = load(Path(folder) / f"w{first}" / "checkpoints")[0].named("anchor").values()
        return Turned(
            (paces[0], paces[1], paces[2]),
            sum(end >= times[1] and each > 3 * usual_s for end, each in lasted_s),
            (between, named_s - times[1]) if named_s else None,
            words[0]["text"].split(";")[0] if words else "",
            {event["step"]: event["val_loss"] for event in honest[0].of("validation")},
            sum(float(each.double().square().sum()) for each in anchor) ** 0.5,
            harm,
        )


def named_in(worker: WorkerProcess, liars: Sequence[str], since_s: float) -> Iterator[Event]:
    """The warnings of a worker that name one of these."""
    for event in worker.of("warning"):
        if at_s(event) >= since_s and any(name in event["text"] for name in liars):
            yield event


if __name__ == "__main__":
    raise SystemExit(main())
