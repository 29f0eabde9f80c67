"""Lease tables that talk to each other without a network."""

from collections import deque
from collections.abc import Iterable

from murmuration.worker.exchange.view import View
from murmuration.worker.leases import LeaseTable, Ledger
from murmuration.worker.leases.ledger import (
    Announce,
    LeaseAction,
    LeaseMessage,
    LeaseNews,
    PeerSilent,
    ShareMessage,
    StreamsDiffer,
)
from murmuration.worker.membership import Health, Member


class Tables:
    """One table for each name.

    Attributes:
        received: by peer, what its train thread is told.
        differing: by peer, the others whose samples are said to be others.
        held_back: peers that messages to and from wait for.
    """

    def __init__(self, *names: str) -> None:
        self.tables: dict[str, LeaseTable] = {}
        self.received: dict[str, deque[LeaseMessage]] = {}
        self.members: dict[str, Member] = {}
        self.silent: list[PeerSilent] = []
        self.differing: dict[str, list[StreamsDiffer]] = {}
        self.held_back: set[str] = set()
        self.gone: set[str] = set()
        self.now = 0.0
        self._under_way: list[tuple[str, Announce]] = []
        for name in names:
            self.join(name)

    def join(self, name: str, epoch: int = 1) -> None:
        """A peer, or another life of it."""
        self.tables[name] = LeaseTable(name, Ledger())
        self.received[name] = deque()
        self.members[name] = Member(name, f"{name}:1", epoch)
        self.all_see()

    def kill(self, name: str, *, seen: bool = True) -> None:
        self.gone.add(name)
        if seen:
            self.members[name] = Member(name, f"{name}:1", epoch=1, health=Health.DEAD)
            self.all_see()

    def all_see(self) -> None:
        for name in self.tables:
            self.see(name, self.members.values())

    def see(self, name: str, members: Iterable[Member]) -> None:
        view = View({member.peer: member for member in members})
        self._done(name, self.tables[name].on_view(view, self.members[name].epoch))

    def handle(self, name: str, message: ShareMessage) -> None:
        """Its train thread says something, and all messages arrive that it gives rise to."""
        self._done(name, self.tables[name].heard(message))

    def close(self, name: str) -> None:
        self._done(name, self.tables[name].close())

    def tick(self, *names: str) -> None:
        for name in names or [name for name in self.tables if name not in self.gone]:
            self._done(name, self.tables[name].tick(self.now))

    def _done(self, name: str, actions: Iterable[LeaseAction]) -> None:
        self._carry_out(name, actions)
        self.deliver()

    def deliver(self) -> None:
        """What is under way arrives everywhere before any answer does: all speak at once."""
        waiting: list[tuple[str, Announce]] = []
        while self._under_way:
            sent, self._under_way = self._under_way, []
            answers: list[tuple[str, str, int, LeaseNews | None]] = []
            for sender, announce in sent:
                peer = announce.peer
                if {sender, peer} & self.held_back:
                    waiting.append((sender, announce))
                elif peer in self.gone:
                    answers.append((sender, peer, announce.number, None))
                else:
                    reply, actions = self.tables[peer].answer(announce.news)
                    self._carry_out(peer, actions)
                    answers.append((sender, peer, announce.number, reply))
            for sender, peer, number, news in answers:
                table = self.tables[sender]
                if sender not in self.gone:
                    lost = news is None
                    actions = (
                        table.unanswered(peer, self.now)
                        if lost
                        else table.answered(peer, number, news)
                    )
                    self._carry_out(sender, actions)
        self._under_way = waiting

    def _carry_out(self, name: str, actions: Iterable[LeaseAction]) -> None:
        for action in actions:
            match action:
                case Announce():
                    self._under_way.append((name, action))
                case PeerSilent():
                    self.silent.append(action)
                case StreamsDiffer():
                    self.differing.setdefault(name, []).append(action)
                case _:
                    self.received[name].append(action)
