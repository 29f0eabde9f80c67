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
from murmuration.worker.membership import Member


class Tables:
    """One table for each name.

    Attributes:
        received: by peer, what its train thread is told.
        differing: by peer, the others whose samples are said to be others.
        gone: peers that answer no more.
    """

    def __init__(self, *names: str) -> None:
        self.tables: dict[str, LeaseTable] = {}
        self.received: dict[str, deque[LeaseMessage]] = {}
        self.members: dict[str, Member] = {}
        self.silent: list[PeerSilent] = []
        self.differing: dict[str, list[StreamsDiffer]] = {}
        self.gone: set[str] = set()
        self.now = 0.0
        self._under_way: list[tuple[str, Announce]] = []
        for name in names:
            self.join(name)

    def join(self, name: str, start_ms: int = 1) -> None:
        """A peer, or another life of it."""
        self.tables[name] = LeaseTable(name, Ledger())
        self.received[name] = deque()
        self.members[name] = Member(name, f"{name}:1", start_ms)
        self.all_see()

    def all_see(self) -> None:
        for name, table in self.tables.items():
            view = View({member.peer: member for member in self.members.values()})
            self._done(name, table.on_view(view, self.members[name].start_ms))

    def handle(self, name: str, message: ShareMessage) -> None:
        """Its train thread says something, and all messages arrive that it gives rise to."""
        self._done(name, self.tables[name].heard(message))

    def tick(self, *names: str) -> None:
        for name in names or [name for name in self.tables if name not in self.gone]:
            self._done(name, self.tables[name].tick(self.now))

    def _done(self, name: str, actions: Iterable[LeaseAction]) -> None:
        """Lets all that is under way arrive before any answer does: all speak at once."""
        self._carry_out(name, actions)
        while self._under_way:
            sent, self._under_way = self._under_way, []
            answers: list[tuple[str, str, int, LeaseNews | None]] = []
            for sender, announce in sent:
                peer, reply = announce.peer, None
                if peer not in self.gone:
                    reply, actions = self.tables[peer].answer(announce.news)
                    self._carry_out(peer, actions)
                answers.append((sender, peer, announce.number, reply))
            for sender, peer, number, news in answers:
                table = self.tables[sender]
                if sender in self.gone:
                    continue
                if news is None:
                    self._carry_out(sender, table.unanswered(peer, self.now))
                else:
                    self._carry_out(sender, table.answered(peer, number, news))

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
