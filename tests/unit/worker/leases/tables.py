"""Lease tables that talk to each other without a network."""

from collections import deque

from murmuration.worker.exchange.view import View
from murmuration.worker.leases import LeaseTable, Ledger
from murmuration.worker.leases.ledger import LeaseMessage, LeaseNews, ShareMessage
from murmuration.worker.membership import Member


class Tables:
    """One table for each name.

    Attributes:
        received: by peer, what its train thread is told.
        differing: by peer, the others whose samples are said to be others.
        gone: peers that answer no more.
        cut: two that do not reach each other."""

    def __init__(self, *names: str) -> None:
        self.tables: dict[str, LeaseTable] = {}
        self.received: dict[str, deque[LeaseMessage]] = {}
        self.members: dict[str, Member] = {}
        self.silent: list[tuple[str, bool]] = []
        self.differing: dict[str, list[str]] = {}
        self.gone, self.cut = set[str](), set[str]()
        self.now = 0.0
        self.under_way: list[tuple[str, str, int, LeaseNews]] = []
        for name in names:
            self.join(name)

    def join(self, name: str, start_ms: int = 1) -> None:
        """A peer, or another life of it."""
        self.received[name] = received = deque[LeaseMessage]()
        self.tables[name] = LeaseTable(
            name,
            Ledger(),
            announce=lambda *told: self.under_way.append((name, *told)),
            silent=lambda *told: self.silent.append(told),
            differs=lambda peer, *_: self.differing.setdefault(name, []).append(peer),
            post=received.append,
        )
        self.members[name] = Member(name, f"{name}:1", start_ms)
        self.all_see()

    def all_see(self) -> None:
        for name, table in self.tables.items():
            view = View({member.peer: member for member in self.members.values()})
            table.on_view(view, self.members[name].start_ms)
            self._arrive()

    def handle(self, name: str, message: ShareMessage) -> None:
        """Its train thread says something, and all messages arrive that it gives rise to."""
        self.tables[name].heard(message)
        self._arrive()

    def tick(self, *names: str) -> None:
        for name in names or [name for name in self.tables if name not in self.gone]:
            self.tables[name].tick(self.now)
            self._arrive()

    def _arrive(self) -> None:
        """Lets all that is under way arrive before any answer does: all speak at once."""
        while self.under_way:
            sent, self.under_way = self.under_way, []
            answers: list[tuple[str, str, int, LeaseNews | None]] = []
            for sender, peer, number, news in sent:
                away = peer in self.gone or {sender, peer} == self.cut
                reply = None if away else self.tables[peer].answer(news)
                answers.append((sender, peer, number, reply))
            for sender, peer, number, reply in answers:
                table = self.tables[sender]
                if reply is None and sender not in self.gone:
                    table.unanswered(peer, self.now)
                elif reply is not None and sender not in self.gone:
                    table.answered(peer, number, reply)
