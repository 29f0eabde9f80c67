"""The train thread: inner steps, with the outer loop between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing. A `Session` is the loop's access to its node. The
daemon has both, and so has `murmuration.Swarm`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment
from murmuration.protos import FORKS_CRASH
from murmuration.protos.documents import STATUS_BYTES, BadDocument, unpack
from murmuration.protos.events import Log, new_event
from murmuration.worker.background import workers
from murmuration.worker.catchup.choices import all_agree, all_leave
from murmuration.worker.config import Config
from murmuration.worker.folder import EventLog
from murmuration.worker.identity.authority import Credentials
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Member, Phase
from murmuration.worker.node.node import Environment, Node, NodeConfig
from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.status.document import ask_peers
from murmuration.worker.training.mailbox import AllStarted, IOThread, Mailbox, Started
from murmuration.worker.training.model import buffers_left_out
from murmuration.worker.training.outer import OuterLoop
from murmuration.worker.training.replica import InnerReplica, RunIsOver
from murmuration.worker.transport import AddressInUse
from murmuration.worker.transport.grpc import GrpcTransport
from murmuration.worker.views.lines import page_event

if TYPE_CHECKING:
    from murmuration.worker.views.history import Look
    from murmuration.worker.views.page import WebServer

T = TypeVar("T")

AWAIT_OTHERS_S = 30.0  # after the last step
_GIVE_S = 1.0  # a result, by a peer that is to end now
_LOOK_AGAIN_S = 0.1
_LOOK_S = 10.0  # to ask all peers
_FORKS_TEXT = (
    "grpc was imported before murmuration: processes that are forked from now on may crash, the "
    "workers of a DataLoader among them; import murmuration first"
)
_POLL_S = 0.1
_USUAL_PERIODS, _LEAST_S = 2, 5.0  # that loops may end apart


class TrainingLoop(OuterLoop):
    """A training loop's way through a run, whoever writes the loop. train thread only.

    `begin`; then for each step `begin_step`, `average_gradients`, the optimizer's step, `end_step`;
    after the last one `end`. `Trainer` goes through it with a task, `murmuration.Swarm` with the
    user's own loop. `in_step` is whether a step has begun that has not ended."""

    in_step = _in_flight = False
    _started_s = 0.0
    _stage: StageReplica | None = None

    @property
    def states(self) -> list[FragmentState]:
        return [each.state for each in self.fragments]

    @property
    def spread(self) -> float | None:
        """How far replicas were from their group's mean, relative to its size: root mean square
        over the fragments; None without pairs."""
        spreads = [each.spread for each in self.fragments if each.spread is not None]
        return math.sqrt(sum(s * s for s in spreads) / len(spreads)) if spreads else None

    @property
    def trains(self) -> bool:
        """Tells whether a step is to come: neither the schedule is over nor the run."""
        return self.step < self._steps and self.stopped is None

    @property
    def error(self) -> BaseException | None:
        """The error that ended the I/O thread, if one has."""
        return self.stopped.error if self.stopped is not None else None

    @property
    def exchanges(self) -> bool:
        """Tells whether there are rounds: else the anchors stay as they began, until the end."""
        return self._plan.exchange != "none"

    def begin(self) -> None:
        """Waits until this peer may train; sends again what was on its way."""
        self.publish()
        exchanged = {spec.name for each in self.fragments for spec in each.fragment.specs}
        left = buffers_left_out(self.replica.model, exchanged) if self.exchanges else {}
        if named := ", ".join(f"{name} ({why})" if why else name for name, why in left.items()):
            text = f"buffers that stay here, whatever the other peers hold: {named}"
            self.reporter.event("warning", text=text)
        self.reporter.event("progress", state="ready")
        started = self._await(Started)
        group = started.group if started is not None else ()
        for each in self.fragments if group else ():
            each.commit(group=group)
        if started is not None:
            self.reporter.event("started", group=list(self.states[0].group), step=self.step)
            if not self.trains and self.stopped is None:
                text = f"the run is over at step {self.step}: there is nothing left to train"
                self.reporter.event("warning", text=text)
        self.reporter.phase = Phase.TRAINING
        self.publish()
        if self._pairs and group:
            self._await(AllStarted)
        if self.stopped is None:
            if self.step:
                self.pace.resumes()
            for each in self._order.in_flight():
                self._post(each)

    def _await(self, kind: type[T]) -> T | None:
        """The next message of that kind; None when the run is stopping."""
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, kind):
                return message
            self.handle(message)
        return None

    def end(self, *, early: bool = False) -> None:
        """Exchanges what is left after the last step, and says that this peer is done. Raises what
        ended the I/O thread. Args: early: all loops have ended before the schedule."""
        self.metrics.trained()
        if self.error is not None:
            raise self.error
        if self._plan.exchange == "none":
            self.commit_parameters()
        if self._plan.consensus and self.stopped is None:
            self.average_replicas(early=early)
        if self.stopped is None:  # else nobody may take the run for ended
            self.reporter.phase = Phase.DONE
        self.publish()

    def leave(self, everybody_leaves: Callable[[], bool], timeout_s: float) -> bool:
        """Stays after the last rounds until all loops have ended, and takes over what the last of
        them has; then comes the mean that ends a run, where the plan has one. Returns whether all
        have; else the others go on without this peer. Two periods of H steps are enough, and some
        seconds at least."""
        self.reporter.phase = Phase.LEAVING
        self.publish()
        usual_s = _USUAL_PERIODS * self._plan.inner_steps * self.pace.step_s
        if not self.await_others(everybody_leaves, min(timeout_s, max(_LEAST_S, usual_s))):
            return False
        if self._plan.consensus:
            self.reporter.phase = Phase.TRAINING
            self.end(early=True)
        return True

    def await_others(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Stays until the others are done, and takes over what the last has; returns if so."""
        deadline = self._clock() + timeout_s
        self.report("settling")
        while self.stopped is None and self._clock() < deadline:
            if done():
                return True
            self.handle(self._mailbox.wait(_POLL_S))
        return False

    def report(self, state: str) -> None:
        self.reporter.progress(self.step, state)

    def begin_step(self, started_s: float | None = None) -> None:
        self._in_flight = any(f.in_flight is not None and f.arrived is None for f in self.fragments)
        self.in_step = True
        self._before, self._step = self.step, min(self._steps, self.step + next(self._strides))
        self.moved = False
        self._started_s = self._clock() if started_s is None else started_s
        if self.metrics.first_step_at is None:
            self.metrics.first_step_at = self._started_s

    def end_step(self, waited_s: float = 0.0, *, exchange: bool = True) -> None:
        """The inner optimizer has taken its step, after `waited_s` without work. With `exchange`
        False no parameter may move now: the next step makes up for it."""
        metrics, self.in_step = self.metrics, False
        metrics.last_step_at = self._clock()
        seconds = metrics.last_step_at - self._started_s - self._averaging_s - waited_s
        metrics.stepped(seconds, in_flight=self._in_flight)
        self.pace.stepped(seconds)
        self.after_inner_step(self.replica.loss, exchange=exchange)
        if self._stage is not None:
            self.publish()  # other stages wait for those that are not done with an iteration
        self.reporter.progress(self.step)


class Trainer(TrainingLoop):
    """The loop that trains a whole model or a stage with a task. train thread only."""

    replica: InnerReplica

    def run(self) -> None:
        """Trains until the last step or a Stop, then in `stopped`. Raises what ended I/O."""
        if isinstance(self.replica, StageReplica):
            self._stage = self.replica
        self.begin()
        while self.trains:
            self._one_step()
        self.end()

    def _one_step(self) -> None:
        self.begin_step()
        stage = self._stage
        waited_s = stage.serve(self, self._mailbox) if stage is not None else 0.0
        self.metrics.visits_wait_s += waited_s
        if self.moved and self.stopped is None:
            return
        gradients: dict[str, Tensor] = {}
        try:
            if self.stopped is None:
                gradients |= self.replica.backward(self.step)
        except RunIsOver:
            while self.stopped is None:
                self.handle(self._mailbox.wait())
        if self.stopped is not None:  # the step is not taken
            self._step = self._before
            return
        visits = stage.visits if stage is not None else 1
        if stage is not None:
            self.reporter.iteration(self.step, visits)
        self.average_gradients(gradients, visits)
        self.replica.inner_step(self.step, gradients)
        gradients.clear()
        self.end_step(waited_s)
        self._between_steps(self)


class Session:
    """A training loop's access to its node, for the daemon and `Swarm`; it is to be closed, and so
    is `log`. train thread only. Args: out, announce: as of `EventLog`."""

    def __init__(
        self,
        config: Config,
        node: NodeConfig,
        manifest: Manifest,
        *,
        fragments: Sequence[Fragment],
        credentials: Credentials,
        mailbox: Mailbox,
        out: Path | None,
        announce: Log,
    ) -> None:
        self._config, self._node, self._manifest = config, node, manifest
        self._fragments, self.log = fragments, EventLog(out, announce, self.complete)
        self._credentials, self._mailbox = credentials, mailbox
        self.transport = GrpcTransport(node.listen, node.proxy, credentials.identity)
        self.io = IOThread(self._make_node, mailbox, self.log)
        self._servers: list[WebServer] = []

    def start(self, parameters: Iterable[Tensor], tokens: int | None = None) -> str:
        """Starts serving and joining, and tells of the run; returns the advertised address. Raises
        AddressInUse. Args: tokens: of an inner step."""
        if FORKS_CRASH:
            self.log(new_event("warning", text=_FORKS_TEXT))
        address, (metrics, place) = self.io.start(), (self._node.metrics, self._node.page)
        try:
            if metrics is not None:
                from murmuration.worker.status.exporter import metrics_server

                node = self.io.node
                server = metrics_server(metrics, lambda: self.io.ask(node.status))
                self._servers.append(server)
                self.log(new_event("metrics", url=f"{server.url}metrics"))
            if place is not None:
                from murmuration.worker.views.page import PageServer

                page = PageServer(place, self._look, encrypted=self.transport.encrypted)
                self._servers.append(page)
                self.log(page_event(page.url, page.token_path))
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
        self.log(run)
        return address

    def complete(self, event: dict[str, object]) -> None:
        """Adds what each event of its kind has."""
        event.setdefault("peer", self._node.peer)
        if event["event"] in ("progress", "result"):
            event |= self.carried
            if self._config.stages.count > 1:
                event["stage"] = self._node.stage
        if event["event"] == "result":
            traffic = self.transport.traffic
            event["probe_bytes_sent"] = traffic.probe_sent_bytes
            event["probe_bytes_received"] = traffic.probe_received_bytes

    def ask(self, question: Callable[[], T]) -> T:
        """The answer of the I/O thread, or of what it has left."""
        with suppress(RuntimeError):  # it has ended
            return self.io.ask(question)
        return question()

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
            environment=Environment(offload=workers(), log=self.log, credentials=self._credentials),
        )
