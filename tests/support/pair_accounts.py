"""The books of a run in pairs: whether what each worker has applied is what partners contributed.

`tests/support/watched.py` writes them; they hold the values themselves, so that a mean is found
again bit for bit.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from murmuration.algorithms.plan import Plan
from murmuration.worker import wire
from murmuration.worker.exchange.pairwise.buffer import ANCHOR, CONTRIBUTION
from murmuration.worker.exchange.pairwise.values import codec_of

Key = tuple[int, int]  # fragment, round


@dataclass(frozen=True)
class Entry:
    """A contribution of `peer`, or a round that it has applied, with how many contributions."""

    peer: str
    kind: str
    fragment: int
    round: int
    contributors: int
    path: Path

    @property
    def key(self) -> Key:
        return self.fragment, self.round

    def parts(self) -> dict[int, Tensor]:
        tensors = load_file(self.path)
        return {ANCHOR: tensors["anchor"], CONTRIBUTION: tensors["values"]}


class PairAccounts:
    """Args:
    folder: with an account of every worker, by name.
    plan: of the run.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._plan = plan
        self._entries = [_entry(path) for path in sorted(folder.glob("*/*"))]

    def applied(self, peer: str | None = None) -> list[Entry]:
        """The rounds that this peer has applied, or everyone has, each peer's in their order."""
        return [e for e in self._entries if e.kind == "applied" and peer in (None, e.peer)]

    def twice(self) -> list[Entry]:
        """Rounds that a peer has applied again, or after a later one."""
        last: dict[tuple[str, int], int] = {}
        again = []
        for entry in self.applied():
            if entry.round <= last.get((entry.peer, entry.fragment), -1):
                again.append(entry)
            last[entry.peer, entry.fragment] = entry.round
        return again

    def mixed(self) -> list[Entry]:
        """What was applied and is no mean of one contribution each of that very round."""
        return [entry for entry in self.applied() if self._group(entry) is None]

    def by_one_only(self) -> list[tuple[Entry, str]]:
        """Rounds that a peer has applied, and a partner whose part is in it has not."""
        applied = Counter((entry.peer, entry.key) for entry in self.applied())
        return [
            (entry, partner)
            for entry in self.applied()
            for partner in self._group(entry) or ()
            if not applied[partner, entry.key]
        ]

    def _group(self, entry: Entry) -> tuple[str, ...] | None:
        """The peers whose parts are in what was applied; None if there are no such."""
        mean = entry.parts()
        for group in self._possible(entry):
            if all(torch.equal(self._mean(group, part), mean[part]) for part in mean):
                return tuple(each.peer for each in group)
        return None

    def _possible(self, entry: Entry) -> Iterator[tuple[Entry, ...]]:
        sent = [e for e in self._entries if e.kind == "sent" and e.key == entry.key]
        for group in combinations(sorted(sent, key=lambda e: e.peer), entry.contributors):
            peers = {each.peer for each in group}
            if entry.peer in peers and len(peers) == len(group):
                yield group

    def _mean(self, group: tuple[Entry, ...], part: int) -> Tensor:
        codec, values = codec_of(self._plan, part), [each.parts()[part] for each in group]
        return wire.average(codec, [wire.encode(codec, each) for each in values], values[0].numel())


def _entry(path: Path) -> Entry:
    _, kind, fragment, round_, contributors = path.name.split("-")
    return Entry(path.parent.name, kind, int(fragment), int(round_), int(contributors), path)
