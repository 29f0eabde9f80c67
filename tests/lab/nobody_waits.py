"""One of eight real workers is slow, flaps or has a slow link, or four leave: what others lose.

    python -m tests.lab nobody-waits [--plan slow flapping link elastic] [--runs 5]
        [--minutes 2.2] [--preset diloco] [--set SECTION.KEY=VALUE] [--out FOLDER]

Workers, links and steps are those of `goodput` (root), with inner steps by speed. With `slow`, w7
takes twice as long for a step. With `flapping`, it is stopped for 5 s of each 20. With `link`, it
has 2 Mbit/s. With `elastic`, four of eight leave after a third of the time, and four newcomers come
after two thirds. In each run all plans are played in turn, beside the same swarm undisturbed. A row
has that one beside the one of the run before, which shows the noise.

The others' speed is inner steps a second of the workers that a plan does not touch, from the plan's
beginning to its end, and in its second half. The loss is held-out, of the anchor, after as many
steps in the model, of all workers together. Both are beside the undisturbed swarm of the same run.
Exits with 1 where a median misses: .99 of the speed, or 0.5 % of the loss.
"""

import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.lab.goodput import MBPS, STEP_S, WORKERS, Fault, Life, missing_names, parser, played
from tests.support.workers import at_s

TARGET, MOST_LOSS = 0.99, 0.005
PLANS, UNDISTURBED = ("slow", "flapping", "link", "elastic"), "undisturbed"
ODD = WORKERS - 1
STILL_S, EACH_S, LINK_MBPS = 5.0, 20.0, 2.0


def plans(minutes: float) -> dict[str, list[Fault]]:
    """The faults of each plan."""
    whole_s = 60 * minutes
    stops = np.arange(EACH_S / 2, whole_s - STILL_S, EACH_S)
    return {
        UNDISTURBED: [],
        "slow": [Fault(0, "half", ODD, whole_s)],
        "flapping": [Fault(float(at_s), "stop", ODD, STILL_S) for at_s in stops],
        "link": [Fault(0, "slow", ODD, whole_s, LINK_MBPS)],
        "elastic": [
            Fault(whole_s / 3, "replace", place, whole_s / 3)
            for place in range(WORKERS // 2, WORKERS)
        ],
    }


@dataclass(frozen=True)
class Played:
    """A run of a swarm, by its events. Args: begins, ends: of the plan."""

    workers: dict[str, list[Life]]
    begins: float
    ends: float

    def speed(self, places: Sequence[int], share: float = 0.0) -> float:
        """Inner steps a second of each of these, after that share of the plan."""
        steps, seconds, since = 0, 0.0, self.begins + share * (self.ends - self.begins)
        for place in places:
            rounds = [each for life in self.workers[f"w{place}"] for each in life.of_kind("round")]
            rounds = [each for each in rounds if since <= at_s(each) <= self.ends]
            steps += sum(each["steps"] for each in rounds[1:])
            seconds += at_s(rounds[-1]) - at_s(rounds[0])
        return steps / seconds

    def losses(self) -> dict[float, float]:
        """The held-out loss by the steps that were in the anchor."""
        found = [life for lives in self.workers.values() for life in lives]
        unnamed, taken, losses = missing_names(found), Counter[int](), dict[float, float]()
        for life in found:
            for event, steps in life.useful(unnamed, least=2):
                taken[event["round"]] += round(steps)
        last = -1
        for event in self.workers["w0"][0].events:
            if event["event"] == "round":
                last = event["round"]
            elif event["event"] == "validation":
                steps = sum(each for number, each in taken.items() if number <= last)
                losses[steps] = event["val_loss"]
        return losses

    def beside(self, other: "Played", places: Sequence[int]) -> tuple[float, float, float]:
        """Beside another run: the speed of these places, that in the second half, and by how much
        the loss is higher after as many steps, in the last half of them."""
        speed, later = (self.speed(places, at) / other.speed(places, at) for at in (0.0, 0.5))
        own, others = self.losses(), other.losses()
        steps = [each for each in own if max(own) / 2 <= each <= max(others)]
        expected = np.interp(np.log(steps), np.log([*others]), [*others.values()])
        return speed, later, float(np.mean([own[each] for each in steps] / expected)) - 1

    def warned(self) -> Counter[str]:
        """The warnings by their first words, whatever the names and numbers."""
        found = [life for lives in self.workers.values() for life in lives]
        texts = [each["text"] for life in found for each in life.of_kind("warning")]
        return Counter(re.sub(r"\d[\d.,]*", "N", text.split(";")[0]) for text in texts)


def main() -> int:
    """Prints a line for each pair of runs, and Markdown; 1 where a plan misses."""
    options_of = parser(__doc__, minutes=2.2, quiet_minutes=0.7, inner_steps=20)
    options_of.add_argument("--plan", nargs="+", choices=PLANS, default=PLANS)
    options_of.add_argument("--runs", type=int, default=5)
    options = options_of.parse_args()
    options.set += ["diloco.dylu=true", "diloco.weighting=work"]
    options.set += [f"run.evaluate_every={2 * options.inner_steps}"]
    found = defaultdict[str, list[tuple[float, float, float]]](list)
    warned = defaultdict[str, Counter[str]](Counter)
    before: Played | None = None
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            out = (options.out or Path(folder)) / f"{number}"
            for name in (UNDISTURBED, *options.plan):
                faults = plans(options.minutes)[name]
                workers, _, begins, ends, _ = played(options, faults, out / name, 1.0, forked=True)
                run = Played(workers, begins, ends)
                warned[name] += run.warned()
                if before is not None:
                    places = sorted({*range(WORKERS)} - {each.place for each in faults})
                    found[name].append(run.beside(before, places))
                    speed, later, loss = found[name][-1]
                    print(f"{number} {name:11} {speed:.3f} {later:.3f} {loss:+.2%}", flush=True)
                if name == UNDISTURBED:
                    before = run
    print(f"\n{WORKERS} workers, {options.preset}, steps of {STEP_S} s, links of {MBPS} Mbit/s\n")
    print("| plan | others' speed: median, worst | in the second half | loss: median, worst |")
    print("| --- | ---: | ---: | ---: |")
    missed = False
    for name, rows in found.items():
        *speeds, losses = zip(*rows, strict=True)
        cells = [f"{statistics.median(each):.3f}, {min(each):.3f}" for each in speeds]
        cells += [f"{statistics.median(losses):+.2%}, {max(losses):+.2%}"]
        print(f"| {name} | {' | '.join(cells)} |")
        missed |= statistics.median(speeds[0]) < TARGET or statistics.median(losses) > MOST_LOSS
    for name, each in warned.items():
        for text, count in each.most_common():
            print(f"{name}: {count} times: {text}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
