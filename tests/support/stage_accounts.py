"""The books of a run in stages, from what its workers have logged: of each iteration the
microbatches that began, were counted and were lost, and of each stage the visits in its gradients.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support.workers import Event

# What tells of a peer that is gone, and how it names it.
_TROUBLE = {"rerouted": "lost", "lost": "replica", "orphaned": "origin"}


@dataclass(frozen=True)
class Iteration:
    """Args:
    begun: all microbatches of every origin that was there as it began, by the origins' own logs:
        those that have ended it, and those that were killed after they had ended the one before.
        Where an origin is killed before it has sent all of its own, those that it kept are among
        them, and unexplained: nobody can tell of them.
    counted: that came back to their origin, and are in the gradient of stage 0.
    dropped: that are said to be lost.
    summed: visits in the gradients of each stage from 1 on.
    expected: visits of each that should be there: those that came back, but for those that were
        skipped or died with a replica, and those in spite of whose origin's death.
    lost: visits of all stages that died with a replica.
    discarded: stages that have left out what a replica had counted.
    """

    begun: int
    counted: int
    dropped: int
    summed: Mapping[int, int]
    expected: Mapping[int, int]
    lost: int
    discarded: frozenset[int]

    @property
    def twice(self) -> int:
        """Visits that count more often than they should."""
        return sum(max(0, n - self.expected[stage]) for stage, n in self.summed.items())

    @property
    def unexplained(self) -> int:
        """Microbatches and visits that are missing, of which nobody says so."""
        missing = sum(
            max(0, self.expected[stage] - n)
            for stage, n in self.summed.items()
            if stage not in self.discarded
        )
        return missing + abs(self.begun - self.counted - self.dropped)


class Accounts:
    """Args:
    out: the run's folder, with a folder of each worker's.
    microbatches: of each origin and iteration.
    """

    def __init__(self, out: Path, microbatches: int) -> None:
        self.events = {
            path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(out.glob("*/events.jsonl"))
        }
        self._microbatches = microbatches
        self.stages = {
            name: next(event["stage"] for event in events if event["event"] == "progress")
            for name, events in self.events.items()
        }

    def of_kind(self, kind: str) -> list[tuple[str, Event]]:
        """Events of all workers, each with its worker's name."""
        return [
            (name, event)
            for name, events in self.events.items()
            for event in events
            if event["event"] == kind
        ]

    def ended(self, name: str) -> list[int]:
        """The iterations whose gradient a worker had, in order."""
        return [e["iteration"] for e in self.events[name] if e["event"] == "iteration"]

    def durations_s(self, name: str) -> dict[int, float]:
        """By iteration, from the end of the one before to its own."""
        ends = [
            (e["iteration"], e["time_s"]) for e in self.events[name] if e["event"] == "iteration"
        ]
        return {number: end - before for (_, before), (number, end) in pairwise(ends)}

    def iteration(self, number: int) -> Iteration:
        """The books of one."""
        ends = [(n, e) for n, e in self.of_kind("iteration") if e["iteration"] == number]
        orphans = self._at("orphaned", number)
        orphaned = sum(len(event["microbatches"]) for _, event in orphans)
        origins = {name: event for name, event in ends if self.stages[name] == 0}
        counted = sum(event["visits"] for event in origins.values())
        lost = self._lost(number)
        skipped = {
            (e["stage"], e["origin"], e["microbatch"])
            for _, e in self._at("rerouted", number)
            if e["instead"] is None and e["origin"] in origins
        }
        later = sorted(set(self.stages.values()) - {0})
        return Iteration(
            begun=self._microbatches * len(self._began(number)),
            counted=counted,
            dropped=len(self._at("dropped", number)) + orphaned,
            summed={
                stage: sum(e["visits"] for name, e in ends if self.stages[name] == stage)
                for stage in later
            },
            expected={
                stage: counted
                + sum(len(e["counted"]) for name, e in orphans if self.stages[name] == stage)
                - sum(len(e["microbatches"]) for e in _of(lost, self._replicas(stage)))
                - sum(each[0] == stage for each in skipped)
                for stage in later
            },
            lost=sum(len(event["microbatches"]) for _, event in lost),
            discarded=frozenset(self.stages[name] for name, _ in self._at("discarded", number)),
        )

    def affected(self, killed: str) -> list[int]:
        """The iterations in which somebody had to go round a worker, or tells what died with it."""
        return sorted(
            {
                event["iteration"]
                for kind, who in _TROUBLE.items()
                for _, event in self.of_kind(kind)
                if event[who] == killed
            }
        )

    def known_gone(self, killed: str) -> int:
        """The iteration that the others were at, at most, when they ceased to count on a worker."""
        return max(
            at
            for name, events in self.events.items()
            if name != killed and (at := _at_when_gone(events, killed)) is not None
        )

    def _began(self, number: int) -> list[str]:
        """The origins that were there at the beginning of an iteration, ended or killed in it."""
        ended = {name: self.ended(name) for name, stage in self.stages.items() if stage == 0}
        return [
            name
            for name, those in ended.items()
            if number in those or number == max(those, default=0) + 1
        ]

    def _at(self, kind: str, iteration: int) -> list[tuple[str, Event]]:
        return [(n, e) for n, e in self.of_kind(kind) if e["iteration"] == iteration]

    def _lost(self, number: int) -> list[tuple[str, Event]]:
        """Visits that died with a replica. An origin that was killed before that was known has said
        only that the replica was silent; which has not ended the iteration."""
        lost = self._at("lost", number)
        known = {(name, event["replica"]) for name, event in lost}
        return lost + [
            (name, event)
            for name, event in self._at("unconfirmed", number)
            if (name, event["replica"]) not in known and number not in self.ended(event["replica"])
        ]

    def _replicas(self, stage: int) -> set[str]:
        return {name for name, its in self.stages.items() if its == stage}


def _of(lost: Sequence[tuple[str, Event]], replicas: set[str]) -> list[Event]:
    return [event for _, event in lost if event["replica"] in replicas]


def _at_when_gone(events: Sequence[Event], killed: str) -> int | None:
    """The iteration that a worker was at when it took another for gone for good; None: never."""
    at, found = 1, None
    for event in events:
        if event["event"] == "iteration":
            at = event["iteration"] + 1
        elif event["event"] == "member" and event["peer_changed"] == killed:
            alive = event["health"] == "alive"
            found = None if alive else found or at
    return found
