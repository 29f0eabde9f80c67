"""Simulated swarms that say only what is news, as `worker.membership.gossip` does, and count its bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.unit.worker.membership_sim import Simulation
from worker.membership import (
    Card,
    Deltas,
    Digest,
    Heard,
    Phase,
    Said,
    Updated,
    with_progress,
)
from worker.membership.gossip import gossip_message

HTTP_BYTES = 30  # of HTTP/2 headers and frames, for each of a call's two messages
RUN = 2**63


class DeltaSimulation(Simulation):
    """A Simulation whose exchanges go through `Deltas`."""

    def __post_init__(self) -> None:
        self.deltas: dict[str, Deltas] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        super().__post_init__()

    def start(self, card: Card, known: tuple[Card, ...]) -> None:
        self.deltas[card.peer] = Deltas(card.peer, self.config.full_s)
        super().start(card, known)

    def update(self, name: str, step: int, digests: tuple[Digest, ...]) -> None:
        """The peer has trained to `step`."""
        if self.processes[name].running:
            self._step(name, Updated(Phase.TRAINING, step, digests))

    def card(self, observer: str, peer: str) -> Card:
        """As the observer knows it."""
        return next(each for each in self.cards(observer) if each.peer == peer)

    def cards(self, observer: str) -> tuple[Card, ...]:
        return self.processes[observer].machine.cards

    def _exchange(
        self, name: str, to: str, timeout_s: float, ended: Callable[[bool], None]
    ) -> None:
        mine = self.deltas[name]
        asked = mine.request(to, self.cards(name), self.now)
        self._count(name, asked)

        def serve(answer: Callable[[Callable[[], None]], None]) -> None:
            self._hear(to, name, asked)
            returned = self.deltas[to].answer(name, asked, self.cards(to))
            self._count(to, returned)
            answer(lambda: self._hear(name, to, returned))

        def end(ok: bool) -> None:
            if not ok:
                mine.failed(to)
            ended(ok)

        self._call(name, to, timeout_s, serve, end)

    def _hear(self, name: str, sender: str, said: Said) -> None:
        self._step(name, Heard(with_progress(said, sender, self.cards(name)), sender))
        self.deltas[name].heard(sender, said, self.cards(name))

    def _count(self, name: str, said: Said) -> None:
        size = gossip_message(located(said), name, RUN).ByteSize()
        self.sent_bytes[name] += size + HTTP_BYTES
        self.messages[name] += 1


def located(said: Said) -> Said:
    """With addresses and epochs of the usual length."""
    cards = (
        replace(c, address=f"10.1.22.{c.peer[1:]}:7000", epoch=c.epoch + 2**40) for c in said.cards
    )
    progress = said.progress
    if progress is not None:
        progress = replace(progress, epoch=progress.epoch + 2**40)
    return replace(said, cards=tuple(cards), progress=progress)
