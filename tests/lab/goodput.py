"""How much of the work of eight real workers ends in the model, through a plan of faults.

    python -m tests.lab goodput [--minutes 30] [--per-minute 2] [--seed 0] [--preset diloco]
        [--set SECTION.KEY=VALUE] [--out FOLDER]

Each worker is a process in a network namespace of its own (root), behind a link of 100 Mbit/s. Its
steps sleep half a second, as a stand-in for a card. After some quiet minutes faults come by a
plan of the seed: `kill` is SIGKILL, then the same command again; `stop` is SIGSTOP, then SIGCONT;
`cut` takes the link down; `slow` makes it 5 Mbit/s both ways; `replace` is SIGTERM, then a newcomer
with another name. Each takes 10 to 30 s. A process that ends unasked is started again at once.

An inner step is useful once a round of most workers has counted it, as the events `round` say. What
a peer contributes again after rounds of a minority is useful too, what it goes on from after a
kill, and what it hands in when it leaves, if the others' events say that so many contributed. Of
several fragments each counts alike.

Goodput is the useful steps from the first fault to the end of the plan, over those at the rate of
the quiet minutes: of all workers at all times, and of those that live by the plan. These do but for
a `kill` or `replace` until the next process is started, and for a `stop`. A second table has what
they have lost, by cause. The rate is corrected for the mean time in which a step is computed.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from murmuration.algorithms.link import Link
from tests.support.namespaces import Namespaces, NoNamespaces
from tests.support.slow_task import TIMES
from tests.support.workers import Event, WorkerProcess, at_s

WORKERS, MAJORITY = 8, 5
MBPS, SLOW_MBPS = 100, 5
STEP_S, LEAST_S, MOST_S = 0.5, 10.0, 30.0  # of a step; of a fault
TARGET = 0.98
PORT = 7700
TASK = "tests.support.slow_task:SlowBytes"
KINDS = ("kill", "stop", "cut", "slow", "replace")
AWAY = ("kill", "stop", "replace")  # a worker does not live meanwhile


@dataclass(frozen=True)
class Fault:
    """Args:
    at_s, for_s: since the end of the quiet minutes.
    place: of the worker, 0 to 7. A newcomer takes the place of the one that has left.
    mbps: of a link that is made slow."""

    at_s: float
    kind: str
    place: int
    for_s: float
    mbps: float = SLOW_MBPS

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s


def plan(seed: int, minutes: float, per_minute: float) -> list[Fault]:
    """One fault in each period, at a random moment. Each kind comes as often, and no worker has two
    at once. All end before the plan does."""
    rng, faults = random.Random(seed), list[Fault]()
    count = max(1, round(minutes * per_minute))
    period_s = (60 * minutes - MOST_S) / count
    kinds: list[str] = []
    for index in range(count):
        kinds = kinds or rng.sample(KINDS, len(KINDS))
        at_s = (index + rng.random()) * period_s
        busy = {each.place for each in faults if each.end_s > at_s}
        place = rng.choice([each for each in range(WORKERS) if each not in busy])
        faults.append(Fault(at_s, kinds.pop(), place, rng.uniform(LEAST_S, MOST_S)))
    return faults


def lived_s(faults: Iterable[Fault], until_s: float) -> float:
    """Seconds that the workers live by the plan, of all together."""
    away = (min(each.end_s, until_s) - each.at_s for each in faults if each.kind in AWAY)
    return WORKERS * until_s - sum(away)


# ------------------------------------------------------------------------------- what was useful


@dataclass
class Life:
    """The events of one process, and when it was started, and killed or told to end by the plan."""

    events: list[Event]
    began: float
    ended: float | None = None
    leaves: bool = False

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def in_rounds(self) -> set[tuple[int, int]]:
        """Fragment and number of those that this process says it was in."""
        rounds = (each for each in self.of_kind("round") if not each["missed"])
        return {(each["fragment"], each["round"]) for each in rounds}

    def useful(
        self, unnamed: Mapping[tuple[int, int], int], least: int = MAJORITY
    ) -> Iterator[tuple[Event, float]]:
        """(event, steps): steps that have ended in the model. Args: unnamed: contributors to a
        round that do not say themselves that they were in it; least: contributors of a round that
        counts."""
        fragments = {each["fragment"] for each in self.events if each["event"] == "round"}
        for event in self.events:
            if event["event"] == "handed_in" and unnamed.get((event["fragment"], event["round"])):
                yield event, event["steps"] / max(1, len(fragments))
            counts = event["event"] == "round" and not event["missed"]
            if counts and event["contributors"] >= least:
                yield event, event["work_steps"] / len(fragments)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Args:
        step_s: of one step's computing, in the quiet minutes and after them.
        rate: steps a second of one worker as in the quiet minutes, at the later time of a step.
        seconds: from the first fault on; rounds: in these.
        useful: steps in these; possible: at that rate; living: by the workers that live.
        stalled_s: that the workers' loops have waited for rounds, of all together.
        unasked: processes that have ended by themselves.
        lost_s: as `losses` has them."""

    step_s: tuple[float, float]
    rate: float
    seconds: float
    rounds: int
    useful: float
    possible: float
    living: float
    stalled_s: float
    unasked: int
    lost_s: dict[str, float]

    def causes(self) -> Iterator[str]:
        """Lines of the second table. What no cause explains is late contributions, other waits and
        slower steps."""
        lived_s = self.living / self.rate
        rest_s = (self.living - self.useful) / self.rate - sum(self.lost_s.values())
        yield f"| lost, of {lived_s:.0f} s that the workers lived | s | share |"
        yield "| --- | ---: | ---: |"
        for cause, seconds in (*self.lost_s.items(), ("the rest", rest_s)):
            yield f"| {cause} | {seconds:.0f} | {seconds / lived_s:.1%} |"

    def row(self, name: str, faults: int) -> str:
        """A line of the table."""
        cells = [
            name,
            str(faults),
            f"{self.seconds / 60:.1f}",
            str(self.rounds),
            "{:.3f}, {:.3f}".format(*self.step_s),
            f"{self.rate:.3f}",
            f"{self.useful:.0f}",
            f"{self.useful / self.possible:.1%}",
            f"{self.useful / self.living:.1%}",
            f"{self.stalled_s / self.seconds / WORKERS:.1%}",
            str(self.unasked),
        ]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| preset | faults | minutes | rounds | s of a step, quiet and then "
    "| steps/s of a worker without faults | useful steps "
    "| of 8 workers always there | of the workers that live by the plan | waited for rounds "
    "| ended unasked |\n| --- |" + 10 * " ---: |"
)


def outcome(
    workers: Mapping[str, Sequence[Life]],
    faults: Sequence[Fault],
    begins: float,
    ends: float,
    unasked: int,
) -> Outcome:
    """Counts between ends of rounds: the first of all, the last before the faults, the first after
    the plan. Args: begins, ends: of the plan, in seconds since the epoch."""
    found = [life for each in workers.values() for life in each]
    unnamed = missing_names(found)
    rounds = [each for life in found for each in life.events if each["event"] == "round"]
    ended = defaultdict[int, list[float]](list)
    for each in rounds:
        if not (each["fragment"] or each["missed"]) and each["contributors"] >= MAJORITY:
            ended[each["round"]].append(at_s(each))
    marks = sorted(
        sorted(times)[MAJORITY - 1] for times in ended.values() if len(times) >= MAJORITY
    )
    first, start = marks[0], max(mark for mark in marks if mark <= begins)
    stop = min((mark for mark in marks if mark >= ends), default=marks[-1])
    slack = STEP_S  # the others learn of the same end a little later
    useful = [(at_s(event), steps) for life in found for event, steps in life.useful(unnamed)]

    def taken(since: float, until: float) -> float:
        return sum(steps for when, steps in useful if since + slack < when <= until + slack)

    def step_s(since: float, until: float) -> float:
        within = [each for each in rounds if since + slack < at_s(each) <= until + slack]
        computed_s = sum(each["steps"] * (each["step_s"] or 0.0) for each in within)
        return float(computed_s / sum(each["steps"] for each in within))

    quiet_s = WORKERS * (start - first) / taken(first, start)  # of a step, waits included
    quiet_step_s, usual_step_s = step_s(first, start), step_s(start, stop)
    rate, seconds = 1 / (quiet_s - quiet_step_s + usual_step_s), stop - start
    return Outcome(
        step_s=(quiet_step_s, usual_step_s),
        rate=rate,
        seconds=seconds,
        rounds=sum(start < mark <= stop for mark in marks),
        useful=taken(start, stop),
        possible=rate * WORKERS * seconds,
        living=rate * (lived_s(faults, stop - begins) + WORKERS * (begins - start)),
        stalled_s=sum(
            each["stall_s"] for each in rounds if start + slack < at_s(each) <= stop + slack
        ),
        unasked=unasked,
        lost_s=losses(found, first, start, stop),
    )


def missing_names(found: Iterable[Life]) -> dict[tuple[int, int], int]:
    """Contributors to each round that do not say themselves that they were in it: those that have
    left, or died, since they contributed."""
    said = Counter(each for life in found for each in life.in_rounds)
    rounds = [each for life in found for each in life.of_kind("round") if not each["missed"]]
    told = {(each["fragment"], each["round"]): each["contributors"] for each in rounds}
    return {key: told[key] - said[key] for key in told}


def losses(found: Sequence[Life], first: float, start: float, stop: float) -> dict[str, float]:
    """Seconds that workers which live by the plan have lost between two moments, by cause."""
    unnamed, lost = missing_names(found), defaultdict[str, float](float)
    stalls = [each for life in found for each in life.of_kind("round")]
    quiet = [each["stall_s"] for each in stalls if first < at_s(each) <= start]
    usual_s = statistics.fmean(quiet) if quiet else 0.0  # as in the rate
    within = [each for each in stalls if start < at_s(each) <= stop + STEP_S]
    lost["rounds that waited, above the usual"] = sum(each["stall_s"] - usual_s for each in within)
    for life in found:
        began = [at_s(each) for each in (*life.of_kind("started"), life.events[-1])][:1]
        if start < life.began < stop:
            lost["starts, until the first step"] += min(began[0], stop) - life.began
        if life.ended is not None and start < life.ended <= stop:
            counted = [at_s(event) for event, _ in life.useful(unnamed)]
            counted += [] if life.leaves else map(at_s, life.of_kind("checkpoint"))
            since_s = life.ended - max([*began, *counted])
            since = "round, of workers that left" if life.leaves else "checkpoint, before kills"
            lost[f"since the last {since}"] += max(0.0, since_s)
    return dict(lost)


# --------------------------------------------------------------------------------- what is done


@dataclass
class Swarm:
    """The processes, each at its place.

    Args:
        folder: each worker has one of its own there.
        halved: places whose steps take twice as long.
        forked: processes are not spawned, but forked from one that has all imports."""

    network: Namespaces
    folder: Path
    options: argparse.Namespace
    halved: Collection[int] = ()
    forked: bool = False
    processes: dict[int, WorkerProcess] = field(default_factory=dict)
    unasked: int = 0
    lives: dict[str, list[Life]] = field(default_factory=dict)  # of everybody, by name

    def start(self, place: int, name: str) -> None:
        os.environ[TIMES] = str(1 + (place in self.halved))
        prefix, python = self.network.members[place].prefix, "" if self.forked else sys.executable
        worker = WorkerProcess(command(self, place, name), name, prefix=prefix, python=python)
        self.processes[place] = worker
        self.lives.setdefault(name, []).append(Life(worker.events, time.time()))

    def begin(self, fault: Fault) -> None:
        worker = self.processes[fault.place]
        life = self.lives[worker.name][-1]
        match fault.kind:
            case "kill":
                life.ended = time.time()
                worker.end()
            case "stop":
                worker.send(signal.SIGSTOP)
            case "cut":
                self.network.switch(fault.place, "down")
            case "slow":
                self.network.shape(fault.place, Link(rate_mbps=fault.mbps))
            case "replace":
                life.ended, life.leaves = time.time(), True
                worker.send(signal.SIGTERM)

    def end(self, fault: Fault) -> None:
        worker = self.processes[fault.place]
        match fault.kind:
            case "kill":
                self.start(fault.place, worker.name)
            case "stop":
                worker.send(signal.SIGCONT)
            case "cut":
                self.network.switch(fault.place, "up")
            case "slow":
                self.network.shape(fault.place, Link(rate_mbps=MBPS))
            case "replace":
                worker.end()  # it has long left
                self.start(fault.place, f"w{len(self.lives)}")

    def watch(self) -> None:
        """Starts again what has ended unasked."""
        for place, worker in self.processes.items():
            asked = self.lives[worker.name][-1].ended is not None
            if not asked and (code := worker.process.poll()) is not None:
                worker.end()
                self.unasked += 1
                print(f"{worker.name} has ended: {code}: {worker.errors[-500:]}", flush=True)
                self.start(place, worker.name)


def command(swarm: Swarm, place: int, name: str) -> list[str]:
    """A worker's."""
    addresses = [f"{member.address}:{PORT}" for member in swarm.network.members]
    own = addresses.pop(place)
    if name == f"w{place}":
        words = ["up", "--min-peers", str(WORKERS), "--preset", swarm.options.preset]
        words += [word for each in addresses for word in ("--join", each)]
        words += ["--steps", "10000000", "--inner-steps", str(swarm.options.inner_steps)]
    else:
        words = ["join", *addresses]
    settings = [f"task.name={TASK}", f"task.pause_s={STEP_S}", *swarm.options.set]
    words += [word for each in settings for word in ("--set", each)]
    words += ["--name", name, "--listen", own, "--out", str(swarm.folder / name)]
    words += ["--insecure", "--json", "--threads", "1"]
    return words


def through(swarm: Swarm, faults: Sequence[Fault], minutes: float) -> None:
    """Does what the plan says, from now on, and returns at its end."""
    began = time.monotonic()
    turns = [(each.at_s, swarm.begin, each) for each in faults]
    turns += [(each.end_s, swarm.end, each) for each in faults]
    for when_s, act, fault in sorted(turns, key=lambda turn: turn[0]):
        attend(swarm, began + when_s)
        act(fault)
    attend(swarm, began + 60 * minutes)


def attend(swarm: Swarm, until: float) -> None:
    """Watches over the processes until that monotonic time."""
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(0.5, left_s))  # between two looks at the processes
        swarm.watch()


def await_rounds(swarm: Swarm) -> None:
    """Until all workers have completed a round."""
    until = time.monotonic() + 180.0
    while not all(list(lives[-1].useful({})) for lives in swarm.lives.values()):
        if time.monotonic() > until:
            raise SystemExit("goodput: no round of all workers in 180 s")
        attend(swarm, time.monotonic() + 1)


def parser(
    text: str | None, *, minutes: float, quiet_minutes: float, inner_steps: int
) -> argparse.ArgumentParser:
    """Returns options with these defaults. SIGTERM ends the workers too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    made = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    made.add_argument("--minutes", type=float, default=minutes, help="of the plan of faults")
    made.add_argument("--quiet-minutes", type=float, default=quiet_minutes, help="before it")
    made.add_argument("--preset", choices=("diloco", "streaming"), default="diloco")
    made.add_argument("--inner-steps", type=int, default=inner_steps)
    made.add_argument("--set", action="append", default=[], help="of a worker")
    made.add_argument("--out", type=Path, help="keep what the workers write here")
    return made


def main() -> int:
    options_of = parser(__doc__, minutes=30.0, quiet_minutes=2.0, inner_steps=50)
    options_of.add_argument("--per-minute", type=float, default=2.0, help="faults")
    options_of.add_argument("--seed", type=int, default=0)
    options = options_of.parse_args()
    faults = plan(options.seed, options.minutes, options.per_minute)
    for each in faults:
        print(f"{each.at_s:7.1f} s  w{each.place}  {each.kind:8} for {each.for_s:.1f} s")
    try:
        with tempfile.TemporaryDirectory() as folder:
            tail_s = 2 * options.inner_steps * STEP_S + 5
            found = outcome(*played(options, faults, options.out or Path(folder), tail_s))
    except NoNamespaces as reason:
        raise SystemExit(f"goodput: {reason}") from reason
    name = ", ".join([options.preset, *options.set])
    print(f"\n{HEAD}\n{found.row(name, len(faults))}\n", *found.causes(), sep="\n")
    return 0 if found.useful / found.living >= TARGET else 1


def played(
    options: argparse.Namespace,
    faults: Sequence[Fault],
    folder: Path,
    tail_s: float,
    *,
    forked: bool = False,
) -> tuple[dict[str, list[Life]], Sequence[Fault], float, float, int]:
    """One run, and that long after its plan: what `outcome` takes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    halved = {each.place for each in faults if each.kind == "half"}
    with Namespaces(WORKERS, Link(rate_mbps=MBPS)) as network:
        swarm = Swarm(network, folder, options, halved, forked)
        try:
            for place in range(WORKERS):
                swarm.start(place, f"w{place}")
            await_rounds(swarm)
            attend(swarm, time.monotonic() + 60 * options.quiet_minutes)
            begins = time.time()
            through(swarm, faults, options.minutes)
            ends = time.time()
            attend(swarm, time.monotonic() + tail_s)
        finally:
            for worker in swarm.processes.values():
                worker.end()
        lives = {name: [e for e in each if e.events] for name, each in swarm.lives.items()}
        return lives, faults, begins, ends, swarm.unasked


if __name__ == "__main__":
    raise SystemExit(main())
