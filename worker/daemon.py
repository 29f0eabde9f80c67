"""The composition root: starts the I/O thread, trains on this one, and ends both in good order."""

import math
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from murmuration.protos.events import new_event
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.files import RESULTS
from murmuration.worker.config import Config, task_of
from murmuration.worker.errors import CheckpointError, MurmurError, UsageError
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.folder import Announce, EventLog, alone_in, leave_json
from murmuration.worker.identity import Identity
from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.library.share import Shares
from murmuration.worker.manifest import Manifest
from murmuration.worker.node.admission import Credentials
from murmuration.worker.node.component import NodeConfig
from murmuration.worker.node.iothread import IOThread
from murmuration.worker.node.session import AWAIT_OTHERS_S, Session
from murmuration.worker.node.supervision import (
    Systemd,
    allow_open_files,
    few_open_files,
    leaving_on,
    return_large_blocks,
)
from murmuration.worker.pipeline.lifecycle import StageLifecycle
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Batch, Cursor, SharesSamples, Warns
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import any_in
from murmuration.worker.training.device import chosen_device
from murmuration.worker.training.evaluation import PeriodicEvaluation
from murmuration.worker.training.export import load_initial
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import Mailbox, StageMove, Stop, TrainingEvent
from murmuration.worker.training.model import trained_parameters
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.training.outer_state import plain_state, refusal, restore_trainer, snapshot
from murmuration.worker.training.result import build_result
from murmuration.worker.training.saving import RemoteCopies, Saver

T = TypeVar("T")

CHECKPOINTS = "checkpoints"

# What others take of this peer's work before it ends, at most: of the 10 s that containers have
# after SIGTERM, and of the 30 s of the shortest notices.
_GRACE_S, _NOTICE_S = 8.0, 25.0

_STATES = 5  # in a checkpoint, each as large as the model: anchor, momentum, local, two of AdamW


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Args:
    node: name, addresses and whom to wait for.
    device: where the model is trained, as `--device` names it.
    leave_on: a file or a URL that tells when this machine will go away, as
        `murmuration.worker.node.supervision.is_noticed` takes it.
    rebuilds: whether the stage is made from its neighbours, since no peer that served it is left.
    identity: what the peer proves itself by; None: nothing is encrypted.
    out: folder for checkpoints, `events.jsonl` and `result.json`.
    resume: go on from the newest checkpoint in `out`: if there is one (None), there must be one
        (True), or not at all, the checkpoints being put aside (False).
    announce: takes each event, for the terminal or a supervisor.
    """

    node: NodeConfig
    out: Path
    resume: bool | None
    announce: Announce
    leave_on: str | None = None
    device: str = "auto"
    rebuilds: bool = False
    identity: Identity | None = None


def run_worker(config: Config, options: WorkerOptions) -> int:
    """Trains until the end, a signal, or an error; returns the exit code. main thread only.

    Raises:
        MurmurError: one line for the user.
    """
    return_large_blocks()
    few = few_open_files(allow_open_files())
    with alone_in(options.out):
        copies = RemoteCopies.begun(
            config.checkpoint, options.out / CHECKPOINTS, fresh=options.resume is False
        )
        while True:
            worker = Worker(config, options, copies)
            if copies is not None and copies.fetched is not None:
                worker.warn(f"{copies.fetched} was fetched from {config.checkpoint.copy_to}")
                copies.fetched = None
            if few is not None:
                worker.warn(few)
            code = worker.run()
            if worker.goes_on is None:
                return code
            options = worker.goes_on


class Worker:
    """One peer's process. Args: copies: where checkpoints go too."""

    def __init__(self, config: Config, options: WorkerOptions, copies: RemoteCopies | None) -> None:
        self._config, self._options = config, options
        self._task = task_of(config)
        self._part = part_of(self._task, config, options.node.stage)
        self._model = self._part.module.to(self._device())
        schema = self._part.schema
        self._fragments = self._part.fragments(config)
        self._manifest = Manifest.of(config, self._part.whole or schema)
        self._log = EventLog(options.out, options.announce, self._enrich)
        self._mailbox = Mailbox()
        self._session = Session(
            config,
            replace(
                options.node,
                activation_shape=getattr(self._task, "activation_shape", None),
            ),
            self._manifest,
            fragments=self._fragments,
            credentials=Credentials.of(options.identity, options.out),
            mailbox=self._mailbox,
            log=self._log,
        )
        self._saver = Saver(
            options.out / CHECKPOINTS,
            config.checkpoint,
            _STATES * sum(each.nbytes for each in self._model.parameters()),
            self._log,
            self._session.saved,
            copies,
        )
        self._shares: Shares | None = None  # of samples that are leased
        self._batches: Generator[Batch] | None = None  # of these
        self._interrupted_by: int | None = None
        self._noticed = False  # that the machine will go away
        self._done = False  # all that there was to do
        self.goes_on: WorkerOptions | None = None  # as what, after a move to another stage

    def warn(self, text: str) -> None:
        """Tells of it, where the worker's events are told. any thread."""
        self._log(new_event("warning", text=text))

    def run(self) -> int:
        """Until the end, a signal or a move; returns the exit code. Raises as `run_worker`."""
        folder = self._options.out / CHECKPOINTS
        for text in self._task.warnings if isinstance(self._task, Warns) else ():
            self.warn(text)
        aside = checkpoint.set_aside(folder) if self._options.resume is False else None
        try:
            return self._run()
        finally:
            self._saver.close()
            self._log.close()
            if aside is not None and not folder.exists():
                aside.rename(folder)  # nothing was saved in its place: the next try may resume it

    def _run(self) -> int:
        resume, folder = self._options.resume, self._options.out / CHECKPOINTS
        restored = self._restore() if resume or (resume is None and any_in(folder)) else None
        own = self._config.inner.optimizer != KSEED  # else the part has loaded them
        if restored is None and self._config.task.init and own:
            self._initialise(Path(self._config.task.init))
        trainer = self._trainer(restored)
        session = self._session
        try:
            with (
                self._signals(),
                leaving_on(self._options.leave_on, self._leave),
                ExitStack() as up,
            ):
                session.start()
                self._log(self._described())
                up.enter_context(Systemd().watched(lambda: session.io.ask(lambda: None)))
                stage = self._stage_life(session.io) if self._part.stage is not None else None
                if stage is not None and self._options.rebuilds:
                    stage.rebuild(trainer, lambda: self._leaves)
                try:
                    trainer.run()
                except MurmurError:
                    if trainer.metrics.inner_steps:  # the run is over for this worker, not its work
                        self._saver.begin(trainer.step, partial(self._snapshot, trainer))
                    raise
                if trainer.moves_to is not None and trainer.stopped is not None:
                    self.goes_on = self._options_for(trainer.moves_to)
                    return 0
                return self._finish(trainer, stage)
        finally:
            session.close()

    # ---------------------------------------------------------------------------------- parts

    def _described(self) -> dict[str, object]:
        config, task = self._config, self._task
        sizes: Any = getattr(task, "batch_size", None), getattr(task, "tokens_per_sample", None)
        batches = config.inner.accumulate
        if self._part.stage is not None:
            batches = config.stages.microbatches
        return new_event(
            "run",
            parameters=sum(each.numel() for each in self._model.parameters()),
            preset=config.preset,
            inner_steps=None if config.plan.exchange == "none" else config.plan.inner_steps,
            steps=config.run.steps,
            tokens=None if None in sizes else math.prod(sizes) * batches,
            device=str(next(self._model.parameters()).device),
        )

    def _stage_life(self, io: IOThread) -> StageLifecycle:
        return StageLifecycle(
            task=self._task,
            config=self._config,
            manifest=self._manifest,
            io=io,
            out=self._options.out,
            log=self._log,
        )

    def _trainer(self, restored: checkpoint.Checkpoint | None) -> Trainer:
        config = self._config
        cursor = Cursor(seed=config.run.seed, stream=self._options.node.peer)
        if restored is not None:
            cursor = replace(cursor, stream=restored.values["stream"])
            cursor = cursor.advance(restored.values["position"])
        replica = self._part.replica(self._task, config, cursor, self._mailbox)
        if config.task.data == "leased":
            replica.batches = self._batches = self._leased_batches(cursor)
            if restored is not None:
                self._options.node.ledger.load(restored.values["samples"])
        trainer = Trainer(
            replica=replica,
            fragments=self._fragments,
            plan=config.plan,
            steps=config.run.steps,
            mailbox=self._mailbox,
            between_steps=self._between_steps,
        )
        if restored is not None:
            left = self._options.node.residuals
            restore_trainer(trainer, restored, config.run.steps, left)
        self._evaluation = PeriodicEvaluation(
            self._task,
            self._model,
            seed=config.run.seed,
            every_steps=config.run.evaluate_every,
            step=trainer.step,
        )
        return trainer

    def _leased_batches(self, cursor: Cursor) -> Generator[Batch]:
        def receive(_stream: int) -> LeaseMessage | None:
            message = self._mailbox.wait_lease()
            return None if isinstance(message, Stop) else message

        assert isinstance(self._task, SharesSamples)
        self._shares = Shares(self._config.run.seed, 0, 1, self._mailbox.post, receive)
        return self._shares.batches(self._task, cursor)

    def _between_steps(self, trainer: Trainer) -> None:
        self._saver.save_if_due(trainer.step, partial(self._snapshot, trainer))
        self._evaluation.evaluate_if_due(trainer, lambda: not self._leaves)

    def _device(self) -> torch.device:
        asked = self._options.device
        if self._part.stage is None:
            return chosen_device(asked)
        if asked not in ("auto", "cpu"):
            raise UsageError(f"--device {asked}: stages train on the CPU; leave it out")
        return torch.device("cpu")

    def _initialise(self, source: Path) -> None:
        """First values of the model from a file; one that joins gets them from the others too."""
        if self._options.node.min_peers is None and not source.exists():
            text = f"[task] init = {source} is not on this machine: the others have the model"
            self._log(new_event("warning", text=text))
            return
        trained = {n: p.detach() for n, p in trained_parameters(self._model).items()}
        load_initial(self._model, source, trained, self._task)

    def _restore(self) -> checkpoint.Checkpoint:
        restored, problems = checkpoint.load(self._options.out / CHECKPOINTS)
        for problem in problems:
            self._log(new_event("warning", text=problem))
        if (reason := refusal(restored.values, self._manifest)) is not None:
            raise CheckpointError(
                f"{restored.path} {reason}; "
                "go on with the settings it was started with, say --fresh to put it aside, or "
                "choose another --out"
            )
        held, mine = restored.values.get("stage"), self._part.stage
        if held != mine:  # it has moved since
            raise CheckpointError(
                f"{restored.path} is of stage {held}, this worker serves stage {mine}; "
                f"resume with --stage {held} or another --out"
            )
        self._log(new_event("resumed", path=str(restored.path), step=restored.values["step"]))
        return restored

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in good order, SIGTERM without an evaluation; a second
        one ends it at once. Once all is done, SIGTERM changes nothing any more."""

        def stop(number: int, _frame: FrameType | None) -> None:
            if self._interrupted_by is not None:
                os._exit(128 + number)
            self._interrupted_by = number
            self._mailbox.answer(Stop(signal.Signals(number).name))

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            if self._done:
                before[signal.SIGTERM] = signal.SIG_IGN
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self) -> None:
        """On a notice that the machine will go away, as after SIGTERM; a signal may still follow.
        any thread."""
        self._noticed = True
        self._log(new_event("preempted", source=str(self._options.leave_on)))
        self._mailbox.answer(Stop("preempted"))

    @property
    def _leaves(self) -> bool:
        """Whether somebody waits for this process to end."""
        return self._noticed or self._interrupted_by is not None

    # ---------------------------------------------------------------------------- checkpoints

    def _snapshot(
        self, trainer: Trainer, *, copied: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        left = self._options.node.residuals
        outer = plain_state(trainer, self._manifest, partial(self._ask, trainer), left)
        tensors, values = snapshot(trainer, outer, self._part.stage, copied=copied)
        if self._shares is not None:
            values["samples"] = self._used_samples(trainer)
        return tensors, values

    def _used_samples(self, trainer: Trainer) -> dict[str, Any]:
        if trainer.stopped is None or trainer.stopped.error is None:
            assert self._shares is not None
            self._shares.tell()
            self._session.settle()
        return self._ask(trainer, self._options.node.ledger.plain)

    def _ask(self, trainer: Trainer, question: Callable[[], T]) -> T:
        """The answer of the I/O thread, or of what it has left."""
        ended = trainer.stopped is not None and trainer.stopped.error is not None
        return question() if ended else self._session.io.ask(question)

    # ------------------------------------------------------------------------------- the end

    def _finish(self, trainer: Trainer, stage: StageLifecycle | None) -> int:
        session = self._session
        if self._batches is not None:
            self._batches.close()  # gives back what is not drawn
        if trainer.stopped is None:
            if stage is not None:
                stage.settle(trainer, session.agreed, AWAIT_OTHERS_S)
            elif self._config.plan.exchange != "none":
                trainer.await_others(session.agreed, AWAIT_OTHERS_S)
        whole = stage.end(trainer) if stage is not None else None
        # What is handed in after it was saved is taken out where this peer is started again.
        saving = self._saver.begin(trainer.step, partial(self._snapshot, trainer, copied=False))
        if trainer.stopped is not None:  # nobody is to wait for it while it saves and evaluates
            if stage is None:
                trainer.hand_in(_NOTICE_S if self._noticed else _GRACE_S)
            session.leave()
        saving.result()
        code = ExitCode.INTERRUPTED if self._interrupted_by == signal.SIGINT else ExitCode.DONE
        if self._saver.failed:
            code = ExitCode.CHECKPOINT
        result = build_result(
            task=self._task,
            config=self._config,
            part=self._part,
            trainer=trainer,
            io=session.io,
            whole=whole,
            saved=self._saver.path,
            hurried=lambda: self._noticed or self._interrupted_by == signal.SIGTERM,
        )
        result["exit_code"] = code
        leave_json(self._options.out / "result.json", result, self._log)
        event = new_event("result", **result)
        self._enrich(event)
        self._mailbox.post(TrainingEvent(dict(event)))
        patience_s = 0.0 if trainer.stopped is not None else AWAIT_OTHERS_S
        results = session.share_result(
            event, patience_s, lambda: not self._leaves or not patience_s
        )
        leave_json(self._options.out / RESULTS, results, self._log)
        self._done = True
        return code

    def _options_for(self, move: StageMove) -> WorkerOptions:
        """This worker's, as a replica of another stage."""
        node = self._options.node
        live = [member.address for member in self._session.others]
        joins = (*dict.fromkeys((*live, *node.joins)),)
        moved = replace(node, stage=move.stage, joins=joins, min_peers=None, residuals=Residuals())
        return replace(self._options, node=moved, resume=False, rebuilds=move.orphaned)

    def _enrich(self, event: dict[str, object]) -> None:
        event.setdefault("peer", self._options.node.peer)
        if event["event"] in ("progress", "result"):
            traffic = self._session.transport.traffic
            event["bytes_sent"] = traffic.sent_bytes
            event["bytes_received"] = traffic.received_bytes
            if self._part.stage is not None:
                event["stage"] = self._part.stage
        if event["event"] == "result":
            event["probe_bytes_sent"] = traffic.probe_sent_bytes
            event["probe_bytes_received"] = traffic.probe_received_bytes
