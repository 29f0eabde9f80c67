"""Simulated swarms that say only what is news, and count its bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.unit.worker.membership_sim import Simulation
from worker.membership import (
    Digest,
    Dissemination,
    GossipMessage,
    Heard,
    Member,
    Phase,
    Updated,
    with_progress,
)
from worker.membership.gossip import gossip_message

HTTP_BYTES = 30  # of HTTP/2 headers and frames, for each of a call's two messages
RUN = 2**63


class DeltaSimulation(Simulation):
    """A Simulation whose exchanges go through `Dissemination`."""

    def __post_init__(self) -> None:
        self.deltas: dict[str, Dissemination] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        super().__post_init__()

    def start(self, member: Member, known: tuple[Member, ...]) -> None:
        self.deltas[member.peer] = Dissemination(member.peer, self.config.full_s)
        super().start(member, known)

    def update(self, name: str, step: int, digests: tuple[Digest, ...]) -> None:
        """The peer has trained to `step`."""
        if self.processes[name].running:
            self._step(name, Updated(Phase.TRAINING, step, digests))

    def member(self, observer: str, peer: str) -> Member:
        """As the observer knows it."""
        return next(each for each in self.members(observer) if each.peer == peer)

    def members(self, observer: str) -> tuple[Member, ...]:
        return self.processes[observer].machine.members

    def _exchange(
        self, name: str, to: str, timeout_s: float, ended: Callable[[bool], None]
    ) -> None:
        mine = self.deltas[name]
        asked = mine.request(to, self.members(name), self.now)
        self._count(name, asked)

        def serve(answer: Callable[[Callable[[], None]], None]) -> None:
            self._hear(to, name, asked)
            returned = self.deltas[to].answer(name, asked, self.members(to))
            self._count(to, returned)
            answer(lambda: self._hear(name, to, returned))

        def end(ok: bool) -> None:
            if not ok:
                mine.failed(to)
            ended(ok)

        self._call(name, to, timeout_s, serve, end)

    def _hear(self, name: str, sender: str, said: GossipMessage) -> None:
        self._step(name, Heard(with_progress(said, sender, self.members(name)), sender))
        self.deltas[name].heard(sender, said, self.members(name))

    def _count(self, name: str, said: GossipMessage) -> None:
        size = gossip_message(located(said), name, RUN).ByteSize()
        self.sent_bytes[name] += size + HTTP_BYTES
        self.messages[name] += 1


def located(said: GossipMessage) -> GossipMessage:
    """With addresses and epochs of the usual length."""
    members = (
        replace(c, address=f"10.1.22.{c.peer[1:]}:7000", epoch=c.epoch + 2**40)
        for c in said.members
    )
    progress = said.progress
    if progress is not None:
        progress = replace(progress, epoch=progress.epoch + 2**40)
    return replace(said, members=tuple(members), progress=progress)
