"""One peer's time in a swarm: its node on the I/O thread, from the first word to the last.

The daemon has one, and so has `murmuration.Swarm`; what they train with is their own affair.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from murmuration.algorithms.fragments import Fragment
from murmuration.protos import FORKS_CRASH
from murmuration.protos.documents import STATUS_BYTES, BadDocument, unpack
from murmuration.protos.events import Log, new_event
from murmuration.worker.background import LoopThread, workers
from murmuration.worker.catchup.choices import all_agree, all_leave
from murmuration.worker.config import Config
from murmuration.worker.identity.authority import Credentials
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Member
from murmuration.worker.node.component import Environment, NodeConfig
from murmuration.worker.node.node import Node
from murmuration.worker.status.document import ask_peers
from murmuration.worker.training.mailbox import Mailbox, Stop
from murmuration.worker.transport import AddressInUse
from murmuration.worker.transport.grpc import GrpcTransport
from murmuration.worker.views.lines import page_event

if TYPE_CHECKING:
    from murmuration.worker.views.history import Look
    from murmuration.worker.views.page import WebServer

AWAIT_OTHERS_S = 30.0  # after the last step
_GIVE_S = 1.0  # a result, by a peer that is to end now
_LOOK_AGAIN_S = 0.1
_LOOK_S = 10.0  # to ask all peers
_FORKS_TEXT = (
    "grpc was imported before murmuration: processes that are forked from now on may crash, the "
    "workers of a DataLoader among them; import murmuration first"
)


class IOThread(LoopThread):
    """The event loop that runs a node, beside the train thread. Args: make: is called on it."""

    def __init__(self, make: Callable[[], Node], mailbox: Mailbox, log: Log) -> None:
        super().__init__("murmur-io", log, lambda error: mailbox.answer(Stop(str(error), error)))
        self._make, self._mailbox = make, mailbox
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None, "start() comes first"
        return self._node

    async def _main(self) -> None:
        self._loop, node = asyncio.get_running_loop(), self._make()
        self._node, self._close = node, node.close
        address = await node.listen()
        self._mailbox.connect(node.deliver, self._loop)
        self._ready.set_result(address)
        await node.run()


class Session:
    """A training loop's access to its node, for the daemon and `Swarm`. train thread only. Args:
    log: may be called from any thread."""

    def __init__(
        self,
        config: Config,
        node: NodeConfig,
        manifest: Manifest,
        *,
        fragments: Sequence[Fragment],
        credentials: Credentials,
        mailbox: Mailbox,
        log: Log,
    ) -> None:
        self._config, self._node, self._manifest = config, node, manifest
        self._fragments, self._log = fragments, log
        self._credentials, self._mailbox = credentials, mailbox
        self.transport = GrpcTransport(node.listen, node.proxy, credentials.identity)
        self.io = IOThread(self._make_node, mailbox, log)
        self._servers: list[WebServer] = []

    def start(self, parameters: Iterable[Tensor], tokens: int | None = None) -> str:
        """Starts serving and joining, and tells of the run; returns the advertised address. Raises
        AddressInUse. Args: tokens: of an inner step."""
        if FORKS_CRASH:
            self._log(new_event("warning", text=_FORKS_TEXT))
        address, (metrics, place) = self.io.start(), (self._node.metrics, self._node.page)
        try:
            if metrics is not None:
                from murmuration.worker.status.exporter import metrics_server

                node = self.io.node
                server = metrics_server(metrics, lambda: self.io.ask(node.status))
                self._servers.append(server)
                self._log(new_event("metrics", url=f"{server.url}metrics"))
            if place is not None:
                from murmuration.worker.views.page import PageServer

                page = PageServer(place, self._look, encrypted=self.transport.encrypted)
                self._servers.append(page)
                self._log(page_event(page.url, page.token_path))
        except OSError as error:
            raise AddressInUse(str(error)) from error
        plan, trained = self._config.plan, list(parameters)
        run = new_event(
            "run",
            parameters=sum(each.numel() for each in trained),
            preset=self._config.preset,
            inner_steps=None if plan.exchange == "none" else plan.inner_steps,
            steps=self._config.run.steps,
            tokens=tokens,
            device=str(trained[0].device),
        )
        self._log(run)
        return address

    @property
    def carried(self) -> dict[str, object]:
        traffic = self.transport.traffic
        return {"bytes_sent": traffic.sent_bytes, "bytes_received": traffic.received_bytes}

    @property
    def others(self) -> list[Member]:
        """The live peers, without this one; none where the I/O thread has ended."""
        gossip = self.io.node.gossip
        with suppress(RuntimeError):  # the next step says why
            return self.io.ask(lambda: [member for member in gossip.others if member.live])
        return []

    def agreed(self) -> bool:
        """Tells whether everyone here is done and has what this peer has, where all should."""
        gossip, plan = self.io.node.gossip, self._config.plan
        with suppress(RuntimeError):
            return self.io.ask(lambda: all_agree(gossip.me, gossip.others, plan))
        return False

    def all_leave(self) -> bool:
        gossip, plan, steps = self.io.node.gossip, self._config.plan, self._config.run.steps
        with suppress(RuntimeError):  # the I/O thread has ended: the train thread is told why
            self.settle()  # this peer's own state is known by then
            return self.io.ask(lambda: all_leave(gossip.me, gossip.others, plan, steps))
        return False

    def saved(self, seconds: float) -> None:
        self.io.node.figures.saved(seconds)

    def share_result(
        self, result: Mapping[str, object], patience_s: float, wanted: Callable[[], bool]
    ) -> dict[str, object]:
        """Gives this peer's result to the others, and waits for theirs while `wanted`, `patience_s`
        at most; 0: until its own is given. Returns what is known of all."""
        results, warnings = self.io.node.results, self.io.node.warnings
        self.io.ask(lambda: results.share({"warnings": list(warnings), **result}))
        until_s = time.monotonic() + (patience_s or _GIVE_S)
        enough = results.is_complete if patience_s else results.is_given
        while wanted() and time.monotonic() < until_s and not self.io.ask(enough):
            time.sleep(_LOOK_AGAIN_S)
        return self.io.ask(results.document)

    def settle(self) -> None:
        self.io.do(self.io.node.settled)

    def leave(self) -> None:
        self.io.do(self.io.node.gossip.leave)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self.io.close()

    def _look(self) -> "Look":
        """On the page's thread."""
        from murmuration.worker.views.history import Look

        node = self.io.node
        packed = self.io.do(lambda: ask_peers(self.others, self.transport), _LOOK_S)
        first = self.io.ask(node.status)
        answers = {str(first["peer"]): first}
        for peer, document in packed.items():
            with suppress(BadDocument):
                answers[peer] = unpack(document, STATUS_BYTES)
        return Look(time.time(), first, answers)

    def _make_node(self) -> Node:
        node, config = self._node, self._config
        if config.plan.exchange == "none" and config.stages.count == 1:
            node = replace(node, min_peers=1)  # nothing is exchanged, so nobody is waited for
        return Node(
            node=node,
            config=config,
            manifest=self._manifest,
            fragments=self._fragments,
            transport=self.transport,
            mailbox=self._mailbox,
            environment=Environment(
                offload=workers(), log=self._log, credentials=self._credentials
            ),
        )
