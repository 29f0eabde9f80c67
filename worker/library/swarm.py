"""`murmuration.Swarm`: a context manager that makes a training loop of one's own a peer's.

Between two steps, in the user's thread, the outer loop reads and writes the model's parameters; at
no other time does anything. docs/library.md has a diagram.
"""

import atexit
import json
import multiprocessing
import os
import socket
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.optim import LBFGS, Optimizer

from murmuration.protos.addresses import is_loopback, public_address, served_at, split_address
from murmuration.protos.events import NO_END, new_event
from murmuration.protos.figures import shown
from murmuration.worker.config import fragments_of
from murmuration.worker.errors import ConfigError, MurmurError, UsageError
from murmuration.worker.folder import EventLog, hold, remembered
from murmuration.worker.identity.authority import Credentials
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.identity.tokens import token_from
from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.library import arguments as args
from murmuration.worker.library.hooks import UserReplica
from murmuration.worker.library.share import Shares
from murmuration.worker.library.site import Site, SiteRank, SwarmProgress, agreed, is_site
from murmuration.worker.library.steps import StepListener, catch_up, follows_position, left_behind
from murmuration.worker.manifest import Manifest
from murmuration.worker.node.admission import Admission, Newcomer
from murmuration.worker.node.node import NodeConfig
from murmuration.worker.node.own_address import Addresses
from murmuration.worker.training import outer_state
from murmuration.worker.training.loop import AWAIT_OTHERS_S, Session, TrainingLoop
from murmuration.worker.training.mailbox import Mailbox, Stop
from murmuration.worker.training.model import trained_parameters
from murmuration.worker.training.optimizers import rates_of
from murmuration.worker.views import PagePlace
from murmuration.worker.wire import tensor_hash

T = TypeVar("T")

_UNSEEN = (
    "the parameters have moved, and no step of an optimizer was seen, so nothing was shared: let a "
    "torch.optim.Optimizer take the steps, by its step(); the model is as the loop has left it"
)
_UNSEEN_MOVES = 3  # before the first step is seen: a loop may set first values
_WRITTEN = (
    "the parameters were written {} of the block, as by load_state_dict or an average: that counts "
    "as learned, or is written over; do it {} the block"
)
_STEPLESS = "nothing is shared, as no optimizer has stepped: train the model, not copies of it"
_UNUSED = (
    "gradients came after the last step, as in a last window of accumulation, and no step has "
    "them: take one more before the block ends"
)
_CLOSED = "a generator is closed, as if its loop were over: contextlib.closing also shows errors"
_NEVER = 1 << 62

_entered: WeakSet["Swarm"] = WeakSet()
_after = ExitStack()  # hooks, from the end of a block to the next one
_going_on: dict[str, str] = {}  # peers of the runs that this process has left, with addresses


class Swarm(StepListener):
    """A peer of a swarm, for as long as the `with` block runs. It hooks the optimizer's `step`.

        with murmuration.Swarm(model, optimizer, join="one.example:7700") as swarm:
            for batch in swarm.shard(loader):
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    When the block ends, the model holds the anchor: the parameters that the swarm agrees on. An
    exception, Ctrl-C among them, leaves the swarm at once and the parameters as they are. On ranks
    of a site but the first this is a `SiteRank`: all must enter, step and leave together.

    Args:
        model: on any device, in fp32, bf16 or fp16. Only what requires a gradient is exchanged.
        optimizer: any of torch's, over the model's parameters; or several, which may step in any
            order. The one that steps most often counts.
        join: `HOST:PORT` of any peer of a run, or several to try; nothing starts a run. Members
            that `out` remembers are tried too.
        preset, inner_steps, steps: of the run that this peer starts: what is exchanged and how, H,
            and the optimizer steps until its end; None takes the preset's own, and no end. A peer
            that joins gets them from there.
        listen, advertise: `HOST:PORT` to serve, and that others reach this peer at;
            `advertise="router"` has the router open a port, by UPnP.
        name: of this peer, different for each; by default the host's and a random mark.
        min_peers: the run starts when this many are here; one that joins leaves that to the others.
        wait_s: how long to wait for them, and to try where nobody answers at `join` (s). By default
            two minutes; a peer that joins waits for the start as long as the others do, and one
            that was a member, by its `out`, tries without end.
        settings: more of the run's TOML, such as `{"diloco.codec": "e3m0"}`.
        out: a folder for `events.jsonl`, and for the peer's key and certificate; None: none.
        serve_metrics: `HOST:PORT`, or a port of loopback, to serve Prometheus at.
        web: likewise, for the page of the swarm; off loopback it wants `out`, for a token.
        no_relay: raise NotDialled where others cannot dial this peer.
        relay_mbps: at which to relay for peers that nobody can dial; 0: for none.
        token: that lets this peer into the run; by default the variable MURMUR_TOKEN. A peer with
            a certificate in `out` needs none.
        insecure: encrypt nothing, and let anybody join.
        progress: print the lines that `murmur up` prints. Without it joins, deaths, waits and the
            first round are told through `logging`, or on stderr where that is not configured.

    Raises UsageError: model, optimizer or an argument cannot be used; ConfigError: a setting;
    ManifestRefused: the run to join trains something else; PeersUnreachable: nobody answers at
    `join`; IdentityError: the run does not let this peer in."""

    def __new__(
        cls, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **arguments: Any
    ) -> Self:
        args.check_names(arguments)
        if is_site(model) and get_rank() > 0:
            # It has the same methods and is no subclass, which would open a swarm of its own.
            return SiteRank(model, optimizer, **arguments)  # type: ignore[return-value]
        return super().__new__(cls)

    @args.checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        join: str | Sequence[str] | None = None,
        preset: str | None = None,
        inner_steps: int | None = None,
        steps: int | None = None,
        listen: str = Addresses.listen,
        advertise: str | None = None,
        name: str | None = None,
        min_peers: int | None = None,
        wait_s: float | None = None,
        settings: Mapping[str, object] | None = None,
        out: str | Path | None = None,
        serve_metrics: str | int | None = None,
        web: str | int | None = None,
        no_relay: bool = False,
        relay_mbps: float = Addresses.relay_mbps,
        token: str | None = None,
        insecure: bool = False,
        progress: bool = False,
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                "a worker process that is spawned imports the script, which must not enter the "
                'swarm a second time: put the script under if __name__ == "__main__":'
            )
        joins = tuple(join or ())
        self._replica = UserReplica(model, optimizer)
        named = {"preset": preset, "inner_steps": inner_steps, "steps": steps}
        given = args.settings_by_argument(named, settings)
        if (frozen := self._replica.frozen_hash) is not None:
            given[f"task.frozen={json.dumps(frozen)}"] = "the hash of the frozen parameters"
        schema, self._frozen, site = self._replica.schema, frozen, is_site(model)
        self._out = Path(out).absolute() if out is not None else None
        self._identity: Identity | None = None
        self._lines = args.LoopLines(progress=progress)
        default_name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._name, self._inside = name or default_name, False

        def terms() -> args.Terms:
            addresses = Addresses(listen, advertise, relayed=not no_relay, relay_mbps=relay_mbps)
            addresses.check()
            admission = Admission(
                folder=self._out,
                default_name=default_name,
                name=name,
                token=token_from(token, None),
                insecure=insecure,
                public=addresses.public,
                listen=listen,
            )
            with Newcomer(joins, wait_s=wait_s, remembered=known, tell=self.warn) as newcomer:
                self._identity = admission.identity(newcomer)
                return args.agree_on_terms(
                    given, addresses, schema, newcomer, self._identity, site=site
                )

        known = remembered(self._out, joins, self.warn)
        decided: args.Terms = agreed(terms) if site else terms()
        self._config, first, found = decided
        self._name = self._identity.name if self._identity else self._name
        self._manifest = Manifest.of(self._config, schema)
        self._fragments = fragments_of(schema, self._config)
        page = served_at(f"{web=}", web)
        if page is not None and out is None and not is_loopback(split_address(page)[0]):
            raise UsageError(
                f"web={web!r}: readers show a token, which is kept in a folder: say out="
            )
        self._node = NodeConfig(
            **vars(found),
            peer=self.name,
            joins=first.peers(joins) if first else (),
            remembered=known.members,
            coordinator=first.address if first and first.coordinated else None,
            metrics=served_at(f"{serve_metrics=}", serve_metrics),
            page=None if page is None else PagePlace(page, self._out or Path()),
            min_peers=min_peers if min_peers is not None else (None if joins else 1),
            wait_s=wait_s if wait_s is not None else (inf if joins else NodeConfig.wait_s),
        )
        self._mailbox = Mailbox()
        self._session: Session | None = None
        self._open, self._resumes = ExitStack(), False
        self._process, self._address = os.getpid(), ""
        self._resumed_s, self._moves = 0.0, 0
        self._wrote_at: Tensor | int = _NEVER  # first, between steps, as a clamp: by inner steps
        self._saved_model = ""  # the hash of what the loaded state goes with
        self._at_anchor = self._told_over = self._told_frozen = self._knows_step = False
        self._rates: list[float] = []  # early in a run under way
        self._site: Site | None = None
        self._strides, self._meets_at = tuple[int, ...](), 0
        if site:
            self._site = Site(self._fragments, self._replica.parameters, self._progress)
            self._replica.accessor = self._site
        rank, ranks = (self._site.rank, self._site.size) if self._site else (0, 1)
        seed, post = self._config.run.seed, self._mailbox.post
        self._shares = Shares(seed, rank, ranks, post, self._lease, self.warn, self._drew)
        # Of other streams than was waited for.
        self._leased: defaultdict[int, deque[LeaseMessage]] = defaultdict(deque)
        with self._speaking():
            self._loop = TrainingLoop(
                replica=self._replica,
                fragments=self._fragments,
                plan=self._config.plan,
                steps=self._config.run.steps,
                mailbox=self._mailbox,
            )
        self._tell_steps(self._open, "before `with swarm:`")

    @args.errors_in_arguments
    def __enter__(self) -> Self:
        """Joins or starts the run; returns when training may begin. Raises AddressInUse: `listen`
        is taken; PeersUnreachable: too few came in time; UsageError: it was entered before."""
        if self._session is not None:
            raise UsageError("this Swarm was entered before: make another one for another block")
        self._open.close()
        self._process, self._entered_in = os.getpid(), id(sys.exception())
        self._session = Session(
            self._config,
            self._node,
            self._manifest,
            fragments=self._fragments,
            credentials=Credentials.of(self._identity, self._out),
            mailbox=self._mailbox,
            out=self._out,
            announce=self._lines,
        )
        with ExitStack() as opening:
            opening.callback(self._session.log.close)
            self._tell_beginning(opening)
            self._steps = opening.enter_context(self._replica.followed(self))
            opening.callback(self._session.close)
            with self._speaking():
                if self._site is not None:
                    self._site.share(self._shares.streams())
                self._replica.refresh()
                self._check_model()
                for each in self._loop.fragments if not self._resumes else ():
                    # The values that the model has now are the first ones.
                    first = each.first_values() if each.state.version == 0 else None
                    if first is not None and not torch.equal(each.state.anchor, first):
                        each.commit(anchor=first)
                self._replica.mark()
                trained = trained_parameters(self._replica.model)
                self._address = self._session.start(trained.values())
                self._loop.begin()
                self._raise_what_ended()
                self._inside = True
                self._settle_ahead()
            if self._replica.written() and (copies := self._replica.copies()):
                told = f"copies of the model from before it took over the run's values: {copies}; "
                self.warn(told + "make those in the block that follow it, as a target network does")
            self._open = opening.pop_all()
        atexit.register(self._end_with_program)
        self._open.callback(atexit.unregister, self._end_with_program)
        _entered.add(self)
        self._open.callback(_entered.discard, self)
        _after.close()
        self._open.callback(self._tell_steps, _after, "after the block of its Swarm")
        self._resumed_s = time.monotonic()
        self._replica.mark()
        return self

    def _tell_steps(self, hooks: ExitStack, when: str) -> None:
        """Tells of the first step of an optimizer out of the block."""
        text = f"an optimizer steps {when}: nobody shares it"
        tell = cache(partial(_warn, self._out, self._lines, self.name, text))  # no state lives on
        for each in self._replica.optimizers:
            hook = each.register_step_pre_hook(lambda *_: None if _entered else tell())
            hooks.enter_context(hook)

    def _tell_beginning(self, opening: ExitStack) -> None:
        if self._out is not None and not hold(self._out, opening):
            told = f"out={str(self._out)!r}: another peer writes there; take a folder for each"
            if self._identity is not None:  # and has the key and the name that are kept there
                raise ConfigError(told)
            self.warn(told)
        if _going_on and not (self._node.joins or self._node.remembered):
            names, address = ", ".join(_going_on), next(iter(_going_on.values()))
            self.warn(
                "this begins another run, and the one that this process left goes on with "
                f"{names}: to go on in that one say join={public_address(address)!r}"
            )
        _going_on.clear()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._is_forked() or not self._inside:
            self._open.pop_all()
            return
        with self._open:
            self._shares.end()
            if isinstance(error, GeneratorExit):  # a generator ends like its loop
                error = cause if id(cause := error.__context__) != self._entered_in else None
                if error is None:
                    self.warn(_CLOSED)
            if error is None:
                try:
                    with self._speaking():
                        self._end()
                        self._inside = False
                except BaseException as another:
                    self._break_off(another, " early, and the model is this peer's own")
                    raise
            else:
                self._break_off(error)

    def _break_off(self, error: BaseException, how: str = "") -> None:
        lost = self._loop.unsent_steps
        if lost or how:
            steps = f"its last {lost} steps are in no round" if lost else "no last round is held"
            self.warn(f"{shown(repr(error), 80)} ends the block{how}: {steps}")
        assert self._session is not None
        _going_on.update({each.peer: each.address for each in self._session.others})
        self._inside = False
        self._loop.handle(Stop(f"{type(error).__name__} in the training loop"))

    @staticmethod
    def leave_all() -> None:
        """Leaves each Swarm of this process as the end of its block does, whatever its name."""
        for each in list(_entered):
            each.__exit__(None, None, None)

    def _end_with_program(self) -> None:
        self.warn("the program ends within the block of a Swarm; use `with`")
        self.__exit__(RuntimeError, RuntimeError("the program ends"), None)

    def _end(self) -> None:
        assert self._session is not None
        loop, exchanges = self._loop, self._config.plan.exchange != "none"
        self._steps.finish()
        early = loop.trains and exchanges  # the loop is shorter than the schedule
        if early and loop.metrics.inner_steps and self._replica.has_gradients:
            self.warn(_UNUSED)
        self._replica.refresh()
        self._tell_late_writes()
        usual = self._told_over or not loop.metrics.inner_steps or self._wrote_at < _NEVER
        if exchanges and not usual and self._replica.written():
            self.warn(_WRITTEN.format("after the last step", "after"))
        if early:
            self._leave(self._session)
        else:
            loop.end()
            if exchanges:
                loop.await_others(self._session.agreed, AWAIT_OTHERS_S)
        self._raise_what_ended()
        if loop.stopped is None:  # peers that wait for all results have this one too
            result = {"reason": "finished", "step": loop.step, **loop.metrics.plain()}
            self._session.share_result(result, 0.0, lambda: True)
        for each in loop.fragments if exchanges and not loop.metrics.inner_steps else ():
            if not torch.equal(each.as_held(each.state.anchor), each.local):
                raise UsageError(_UNSEEN)
        if early and not loop.metrics.inner_steps:
            self.warn(_STEPLESS)
        for each in loop.fragments if exchanges else ():
            if not (early and each.work_steps):  # what is in no round stays as it is
                each.write(each.state.anchor)
        for optimizer in self._replica.schedule_free if exchanges else ():
            optimizer.state.clear()  # its eval() would move the model off the anchor
        if self._site is None and self._replica.frozen_hash != self._frozen:
            self.warn(
                "frozen parameters have changed, and no round has them: make buffers of those that "
                "a loop moves; after a merge LoRA's base differs by rounding, so load it again"
            )

    def _leave(self, session: Session) -> None:
        loop, others = self._loop, [each.peer for each in session.others]
        loop.metrics.trained()
        if others:
            loop.send_last_rounds()
        else:  # nothing is exchanged, and all stays in the model
            loop.apply_in_flight()
        everybody = loop.stopped is None and loop.leave(session.all_leave, AWAIT_OTHERS_S)
        _going_on.update({} if everybody else {e.peer: e.address for e in session.others})
        others = [] if everybody else [each.peer for each in session.others]
        event = new_event("left", step=loop.step, unsent_steps=loop.unsent_steps, others=others)
        event |= {"apart": bool(others) and self._config.plan.consensus, "steps": self.steps}
        session.log(event)

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_forked():
            raise UsageError(
                "this process was forked within the block of a Swarm, and its parent is the peer: "
                "train and draw samples there"
            )

    def _step_begins(self, *, in_closure: bool) -> None:
        self._check_process()
        if self._at_anchor:
            raise UsageError(
                "within swarm.anchor() the model holds the anchor, and what it learns there is "
                "undone: let the optimizer step outside of it"
            )
        if not self._loop.trains:
            return
        self._replica.refresh()
        steps, written = self._loop.metrics.inner_steps, self._replica.written()
        if steps == 1 and self._wrote_at < _NEVER and not written:
            self.warn(_WRITTEN.format("before the first step", "before"))
        if steps == 1:
            self._tell_at_second_step()
        self._wrote_at = torch.where(written, steps, _NEVER).clamp(max=self._wrote_at)
        if self._loop.in_step and self._config.plan.payload == "gradient":
            self._loop.end_step(exchange=False)  # it has failed here, and the others have taken it
        self._loop.begin_step(self._resumed_s)
        if self._config.plan.payload == "gradient":
            if in_closure:
                raise UsageError(
                    "preset ddp averages gradients before optimizer.step, which here computes them "
                    "in a closure, as Lightning does; call step() without one, or take another "
                    "preset"
                )
            gradients = self._replica.gradients
            self._loop.average_gradients(gradients)
            self._replica.set_gradients(gradients)

    def _optimizer_joins(self, optimizer: Optimizer, *, late: bool) -> None:
        self._replica.note()
        if self._config.plan.payload == "gradient":
            self._replica.check_averaged(optimizer)
        self._wrote_at = 0 if late else self._wrote_at
        for each in self._loop.fragments if late else ():
            each.work_steps = max(1, each.work_steps)  # parameters move as in the next step

    def _step_ends(self, *, moves: bool) -> None:
        loop = self._loop
        if not loop.in_step:
            if loop.step >= self._config.run.steps and not self._told_over:
                self._told_over = True
                text = "further steps are nobody's; stop at swarm.done"
                self.warn(f"the run is over at step {loop.step}: {text}")
            return
        self._replica.refresh()
        if loop.metrics.inner_steps == 1 and self._replica.is_kept_twice:
            self.warn("an optimizer's own weights undo each round: let it go on from parameters")
        versions = [each.state.version for each in loop.fragments]
        if not moves or loop.step < self._meets_at:
            loop.end_step(exchange=False)
        else:
            with self._speaking():
                loop.end_step()
                self._raise_what_ended()
                self._settle_ahead()
        if self._site is None and versions != [each.state.version for each in loop.fragments]:
            for each in (each for each in self._replica.optimizers if isinstance(each, LBFGS)):
                each.state.clear()  # its next pair would have the round between its gradients
        self._replica.mark()
        if loop.step % (2 * self._config.plan.inner_steps) == 0:
            self._tell_frozen()
            self._tell_late_writes()
            self._tell_rates()
        if moves:
            self._resumed_s = time.monotonic()

    def _tell_at_second_step(self) -> None:
        step = self._loop.step
        behind = step > self._config.plan.inner_steps + 10
        late = left_behind(self._replica.optimizers) if behind else []
        for each in late:
            its = "swarm.catch_up(scheduler)" if follows_position(each) else "set its rate by hand"
            self.warn(f"{type(each).__name__} is at step 1, the run at {step}: {its}")
        if behind and not (late or self._resumes):
            self._rates = [*rates_of(self._replica.optimizers)]
        queues = [n for f in self._loop.fragments if self._site is None for n in f.queues()]
        if queues and self._loop.exchanges:
            told = f"rounds average the buffers {', '.join(queues)}, where steps replace values: "
            self.warn(told + "register what is no average, as a queue, with persistent=False")

    def _tell_rates(self) -> None:
        """A schedule by hand, or by a loss, that begins in a run under way."""
        rates = rates_of(self._replica.optimizers)
        moved = any(rate != first for rate, first in zip(rates, self._rates, strict=False))
        if moved and not self._knows_step:
            self.warn(
                "the learning rate changes in this loop, which came to a run under way and does "
                f"not read swarm.step, {self._loop.step} by now: set the rate by that"
            )
            self._rates = []

    def _tell_late_writes(self) -> None:
        late = self._config.plan.inner_steps < (at := int(self._wrote_at)) < _NEVER
        if late and self._loop.exchanges:
            self.warn(_WRITTEN.format(f"after step {at}", "outside"))
            self._wrote_at = 0

    def _tell_frozen(self) -> None:
        """A GAN freezes one half while the other steps, and that is no matter."""
        frozen = self._replica.take_frozen()
        if frozen and not self._told_frozen and self._config.plan.exchange != "none":
            self._told_frozen = True
            more = f" and {n} more stay" if (n := len(frozen) - 1) else " stays"
            self.warn(
                f"{min(frozen)!r}{more} frozen in the swarm, where others and the outer momentum "
                "still move parameters: freeze before the block what is never to move"
            )

    def _settle_ahead(self) -> None:
        if self._site is not None:
            self._strides = self._loop.agree_ahead()
            self._meets_at = self._loop.step + sum(self._strides)

    def _others_step(self, optimizer: Optimizer, tensors: int) -> None:
        self.warn(
            f"{type(optimizer).__name__} steps {tensors} parameters that are in no swarm, so they "
            "are trained on this peer alone; for one swarm put all models into a "
            "torch.nn.ModuleList, and give Swarm that and a list of the optimizers"
        )

    def _raise_what_ended(self) -> None:
        if (error := self._loop.error) is not None:
            raise args.for_python(error) if isinstance(error, MurmurError) else error

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        """`HOST:PORT` that others join at."""
        return public_address(self._address)

    @property
    def step(self) -> int:
        """Position in the run's schedule, from 0. Joining a run under way begins further on."""
        self._knows_step = True
        return self._loop.step

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None without an end."""
        return None if self._config.run.steps >= NO_END else self._config.run.steps

    @property
    def done(self) -> bool:
        """Says whether the last step is taken. Raises UsageError: no optimizer's step is seen."""
        begun = not self._inside or self._loop.metrics.inner_steps or self._loop.in_step
        if not begun and self._replica.written():
            self._replica.mark()
            self._moves, self._wrote_at = self._moves + 1, 0
            if self._moves >= _UNSEEN_MOVES:
                raise UsageError(_UNSEEN)
        return not self._loop.trains

    def catch_up(self, *schedulers: Any, every: int = 1) -> None:
        """Steps schedulers of the learning rate to where the run is: for a peer that joins under
        way, or skips steps. One that is there stays, so that this may stand in each turn of a loop.

        Args: schedulers: of torch's, each with a step for every `every` steps of the optimizer.
        Raises UsageError: one follows something else than its steps, as ReduceLROnPlateau does."""
        catch_up(schedulers, self.step, every)

    @property
    def peers(self) -> tuple[str, ...]:
        """The live peers by name, this one among them; outside the block only this one."""
        inside = self._inside and not self._is_forked()
        others = self._session.others if inside and self._session is not None else []
        return tuple(sorted({self.name, *(member.peer for member in others)}))

    @property
    def is_first(self) -> bool:
        """Tells whether this peer's name is the first of the live: one of them may log and save."""
        return self.name == self.peers[0]

    @property
    def metrics(self) -> dict[str, object]:
        """Figures of this peer so far: steps, rounds, seconds computed and stalled, bytes."""
        found: dict[str, object] = {"step": self._loop.step, **self._loop.metrics.plain()}
        return found | (self._session.carried if self._session is not None else {})

    def report(self, loss: float | Tensor) -> None:
        """Tells the swarm the loss of the step to come. Of a tensor the value is read at once,
        which on a GPU waits for it. Raises UsageError: it is not one number."""
        try:
            self._replica.loss = loss.item() if isinstance(loss, Tensor) else float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            wanted = f"one number, such as loss.mean(), not {type(loss).__name__}: {error}"
            raise UsageError(f"swarm.report takes {wanted}") from error

    def shard(
        self, loader: Iterable[T], *, name: str = "", block: int | None = None
    ) -> Iterator[T]:
        """Batches of one epoch that no other peer has, until nobody has any left or the run ends.

        Every sample of an epoch is drawn once, by blocks that are leased: docs/library.md. What is
        iterated again gives the next epoch. Args: loader: with the same samples on every peer;
        name: tells sets of data apart, such as those of training and validation; block: samples
        that are leased together (items where `loader` is no `DataLoader`), the same on every peer.
        Raises UsageError: out of the block or in a forked process, `block` or `name` cannot be
        used, or the loader has no order that all peers can have."""
        self._check_process()
        if not self._inside:
            raise UsageError("swarm.shard is for the inside of the `with` block")
        return self._shares.share(loader, name, block, lambda: self.done or not self._inside)

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """The model with the anchor's values, for evaluation; the local ones come back after it."""
        with self._speaking():
            fragments = self._loop.fragments if self._loop.exchanges else []  # else it is local
            locals_ = [each.local for each in fragments]
            for each in fragments:
                each.write(each.state.anchor)
        before, self._at_anchor = self._at_anchor, True
        try:
            yield self._replica.model
        finally:
            self._at_anchor = before
            with self._speaking():
                for each, local in zip(fragments, locals_, strict=True):
                    each.write(local)

    def state_dict(self) -> dict[str, Any]:
        """The outer state, to be saved beside the model's and the optimizer's own of the same
        moment. Tensors are not copied: they are never written again. On a site all but rank 0's are
        empty. docs/library.md has what is in it. Raises UsageError: in a block of `anchor`."""
        if self._at_anchor:
            raise UsageError(
                "state_dict goes with the parameters that are trained, and in swarm.anchor() the "
                "model holds others: call it, and the model's own, outside of that block"
            )
        outer = outer_state.plain_state(self._loop, self._manifest, self._ask, self._node.residuals)
        self._check_process()
        if self._inside and self._session is not None:
            self._shares.tell()
            self._session.settle()
        used = {"samples": self._ask(self._node.ledger.plain), "streams": self._shares.streams()}
        return outer_state.packed(outer | {"model": self.model_hash(), **used})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`, before the `with` block; the model's and the optimizer's own
        are loaded beside it. The run may be longer than it was. Raises UsageError: in the block, or
        the state is of another run: the setting that differs."""
        if self._session is not None:
            raise UsageError("load_state_dict comes before `with`: create the Swarm, load, enter")
        if "rest" not in state:
            what = "empty, as on all ranks of a site but the first: load rank 0's"
            other = "no state of swarm.state_dict(), or one of an earlier version"
            raise UsageError(f"this state is {other if state else what}")
        state = outer_state.unpacked(state)
        if (reason := outer_state.refusal(state, self._manifest)) is not None:
            raise UsageError(
                f"this state {reason}; make Swarm with the model and the settings of then"
            )
        self._resumes = True
        outer_state.restore_state(self._loop, state, self._config.run.steps, self._node.residuals)
        self._saved_model = state.get("model", "")
        if "samples" in state:
            self._node.ledger.load(state["samples"])
        self._shares.load_streams(state.get("streams", ()))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError("no Swarm can be copied or pickled: save its state_dict()")

    def warn(self, text: str) -> None:
        """Tells of it: a warning in the log, in `events.jsonl` and, within the block, in status."""
        if self._inside:
            self._loop.reporter.event("warning", text=text)
            return
        _warn(self._out, self._lines, self.name, text)

    def model_hash(self) -> str:
        """The hash of the local parameters that travel; empty where other ranks hold some."""
        return "" if self._site else tensor_hash(each.local for each in self._loop.fragments)

    def _check_model(self) -> None:
        """The loaded state goes with parameters: what others differ by counts as learned since."""
        saved, self._saved_model = self._saved_model, ""
        if not saved or self._site is not None or saved == self.model_hash():
            return
        self.warn(
            "the model does not hold what it held when the swarm's state was saved: all that it "
            "differs by from the anchor counts as learned; load the model's state of that moment"
        )
        for each in self._loop.fragments:
            each.start_from_anchor()

    def _ask(self, question: Callable[[], T]) -> T:
        return question() if self._session is None else self._session.ask(question)

    def _lease(self, stream: int) -> LeaseMessage | None:
        """The next message of a stream of samples; None when the run is over for this peer."""
        kept = self._leased[stream]
        while self._inside and not kept:
            if isinstance((message := self._mailbox.wait_lease()), Stop):
                break
            self._leased[message.stream].append(message)
        found = kept.popleft() if kept else None
        if self._site is not None:
            self._site.share(found)
        return found

    def _drew(self, batches: int, of: int) -> None:
        self._loop.reporter.event("epoch", batches=batches, of=of)

    def _progress(self) -> SwarmProgress:
        return SwarmProgress(
            self._loop.step, self._strides, self.steps, self.done, self.name, self.peers
        )

    def _speaking(self) -> AbstractContextManager[None]:
        """Around all that reads or writes parameters: on a site the other ranks take part."""
        return self._site.speaking() if self._site is not None else nullcontext()


def _warn(out: Path | None, lines: args.LoopLines, peer: str, text: str) -> None:
    events = EventLog(out, lines, lambda event: event.update(peer=peer))
    events(new_event("warning", text=text))
    events.close()
