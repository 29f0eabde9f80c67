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
from typing import Any

import torch
from torch import Tensor

from murmuration.protos.events import Log, new_event
from murmuration.protos.exit_codes import ExitCode, ending_signals
from murmuration.protos.files import RESULTS
from murmuration.worker.config import Config, task_of
from murmuration.worker.errors import CheckpointError, MurmurError, UsageError
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.folder import alone_in, leave_json
from murmuration.worker.identity.authority import Credentials
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.leases.ledger import LeaseMessage
from murmuration.worker.library.share import Shares
from murmuration.worker.manifest import Manifest
from murmuration.worker.node import supervision
from murmuration.worker.node.node import NodeConfig
from murmuration.worker.pipeline.part import StageLifecycle, part_of
from murmuration.worker.tasks import Batch, Cursor, SharesSamples, Warns
from murmuration.worker.training import checkpoint
from murmuration.worker.training.device import chosen_device
from murmuration.worker.training.evaluation import PeriodicEvaluation
from murmuration.worker.training.export import load_initial
from murmuration.worker.training.loop import AWAIT_OTHERS_S, Session, Trainer
from murmuration.worker.training.mailbox import Mailbox, Stop, TrainingEvent
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.training.outer_state import plain_state, refusal, restore_trainer, snapshot
from murmuration.worker.training.result import build_result
from murmuration.worker.training.saving import RemoteCopies, Saver

CHECKPOINTS = "checkpoints"

# What others take of this peer's work before it ends, at most: of the 10 s that containers have
# after SIGTERM, and of the 30 s of the shortest notices.
_GRACE_S, _NOTICE_S = 8.0, 25.0
_STATES = 5  # in a checkpoint, each as large as the model: anchor, momentum, local, two of AdamW


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    node: NodeConfig
    out: Path  # folder for checkpoints, `events.jsonl` and `result.json`
    # Go on from the newest checkpoint in `out`: if there is one (None), there must be one (True),
    # or not at all, the checkpoints being put aside (False).
    resume: bool | None
    announce: Log  # takes each event, for the terminal or a supervisor
    # A file or a URL that tells when this machine will go away (`supervision.is_noticed`).
    leave_on: str | None = None
    device: str = "auto"  # where the model is trained, as `--device` names it
    # Whether the stage is made from its neighbours, since no peer that served it is left.
    rebuilds: bool = False
    identity: Identity | None = None  # what the peer proves itself by; None: nothing is encrypted


def run_worker(config: Config, options: WorkerOptions) -> int:
    """Trains until the end or a signal; the exit code. Raises MurmurError. main thread only."""
    supervision.return_large_blocks()
    few = supervision.few_open_files(supervision.allow_open_files())
    folder, fresh = options.out / CHECKPOINTS, options.resume is False
    worker: Worker | None = None
    systemd = supervision.Systemd().watched(lambda: worker.answers() if worker else None)
    with alone_in(options.out), systemd:
        copies = RemoteCopies.begun(config.checkpoint, folder, fresh=fresh)
        while True:
            worker = Worker(config, options, copies)
            while copies is not None and copies.to_tell:
                worker.warn(copies.to_tell.pop(0))
            if few is not None:
                worker.warn(few)
            code = worker.run()
            if worker.goes_on is None:
                return code
            options = worker.goes_on


class Worker:
    def __init__(self, config: Config, options: WorkerOptions, copies: RemoteCopies | None) -> None:
        self._config, self._options = config, options
        self._folder = options.out / CHECKPOINTS
        self._task = task_of(config)
        self._part = part_of(self._task, config, options.node.stage)
        device = torch.device("cpu")
        if self._part.stage is None:
            device = chosen_device(options.device)
        elif options.device not in ("auto", "cpu"):
            raise UsageError(f"--device {options.device}: stages train on the CPU; leave it out")
        self._model = self._part.module.to(device)
        self._fragments = self._part.fragments(config)
        self._manifest = Manifest.of(config, self._part.whole or self._part.schema)
        self._mailbox = Mailbox()
        shape = getattr(self._task, "activation_shape", None)
        self._session = Session(
            config,
            replace(options.node, activation_shape=shape),
            self._manifest,
            fragments=self._fragments,
            credentials=Credentials.of(options.identity, options.out),
            mailbox=self._mailbox,
            out=options.out,
            announce=options.announce,
        )
        self._log = self._session.log
        self._saver = Saver(
            self._folder,
            config.checkpoint,
            _STATES * sum(each.nbytes for each in self._model.parameters()),
            self._log,
            self._session.saved,
            copies,
        )
        self._shares: Shares | None = None  # of samples that are leased
        self._batches: Generator[Batch] | None = None  # of these
        self._interrupted_by: int | None = None
        self._code = ExitCode.DONE  # unless something fails
        self._noticed = False  # that the machine will go away
        self._done = False  # all that there was to do
        self.answers: Callable[[], object] = lambda: None  # nothing does while it loads a model
        self.goes_on: WorkerOptions | None = None  # as what, after a move to another stage

    def warn(self, text: str) -> None:
        self._log(new_event("warning", text=text))

    def run(self) -> int:
        folder = self._folder
        for text in self._task.warnings if isinstance(self._task, Warns) else ():
            self.warn(text)
        aside = checkpoint.set_aside(folder) if self._options.resume is False else None
        try:
            code = self._run(aside)
            if self.goes_on is not None and self._leaves:  # it was told so as it moved
                self.goes_on, code = None, self._code
            return code
        finally:
            self._saver.close()
            self._log.close()
            if aside is not None and not folder.exists():
                aside.rename(folder)  # nothing was saved in its place: the next try may resume it

    def _run(self, aside: Path | None) -> int:
        options, resume = self._options, self._options.resume
        found = resume or (resume is None and checkpoint.any_in(self._folder))
        restored = self._restore() if found else None
        own = self._config.inner.optimizer != KSEED  # else the part has loaded them
        if restored is None and self._config.task.init and own:
            source = Path(self._config.task.init)
            if options.node.min_peers is None and not source.exists():
                text = f"[task] init = {source} is not on this machine: the others have the model"
                self.warn(text)
            else:  # one that joins gets them from the others too
                load_initial(self._model, source, self._task)
        trainer, session, stage = self._trainer(restored), self._session, None
        del restored  # a file that is mapped takes the disk until nobody holds its tensors
        leaving = supervision.leaving_on(options.leave_on, self._leave)
        try:
            with self._signals(), leaving, ExitStack() as up:
                session.start(self._model.parameters(), self._tokens())
                if aside is not None:
                    self.warn(f"{aside} holds what was saved before: renamed back, it can resume")
                up.callback(setattr, self, "answers", self.answers)
                self.answers = lambda: session.io.ask(lambda: None)
                supervision.Systemd().tell("READY=1")
                if self._part.stage is not None:
                    run = self._task, self._config, self._manifest
                    stage = StageLifecycle(*run, session.io, options.out, self._log)
                    if options.rebuilds:
                        stage.rebuild(trainer, lambda: self._leaves)
                try:
                    trainer.run()
                except MurmurError:
                    if trainer.metrics.inner_steps:  # the run is over for this worker, not its work
                        self._saver.begin(trainer.step, partial(self._snapshot, trainer))
                    raise
                if (move := trainer.moves_to) and trainer.stopped and not self._leaves:
                    live = [member.address for member in session.others]
                    joins = (*dict.fromkeys((*live, *options.node.joins)),)
                    node = replace(options.node, stage=move.stage, joins=joins, min_peers=None)
                    node = replace(node, residuals=Residuals())
                    self.goes_on = replace(options, node=node, resume=False, rebuilds=move.orphaned)
                    return 0
                return self._finish(trainer, stage)
        finally:
            session.close()

    def _tokens(self) -> int | None:
        """Tokens of an inner step; None where the task does not say."""
        task, config = self._task, self._config
        sizes: Any = getattr(task, "batch_size", None), getattr(task, "tokens_per_sample", None)
        whole = self._part.stage is None
        batches = config.inner.accumulate if whole else config.stages.microbatches
        return None if None in sizes else math.prod(sizes) * batches

    def _trainer(self, restored: checkpoint.Checkpoint | None) -> Trainer:
        config = self._config
        cursor = Cursor(seed=config.run.seed, stream=self._options.node.peer)
        if restored is not None:
            cursor = replace(cursor, stream=restored.values["stream"])
            cursor = cursor.advance(restored.values["position"])
        replica = self._part.replica(self._task, config, cursor, self._mailbox)
        if config.task.data == "leased":
            assert isinstance(self._task, SharesSamples)
            self._shares = Shares(config.run.seed, 0, 1, self._mailbox.post, self._lease)
            replica.batches = self._batches = self._shares.batches(self._task, cursor)
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
            restore_trainer(trainer, restored, config.run.steps, self._options.node.residuals)
        self._evaluation = PeriodicEvaluation(
            self._task,
            self._model,
            seed=config.run.seed,
            every_steps=config.run.evaluate_every,
            step=trainer.step,
        )
        return trainer

    def _lease(self, _stream: int) -> LeaseMessage | None:
        message = self._mailbox.wait_lease()
        return None if isinstance(message, Stop) else message

    def _between_steps(self, trainer: Trainer) -> None:
        self._saver.save_if_due(trainer.step, partial(self._snapshot, trainer))
        self._evaluation.evaluate_if_due(trainer, lambda: not self._leaves)

    def _restore(self) -> checkpoint.Checkpoint:
        restored, problems = checkpoint.load(self._folder)
        for problem in problems:
            self.warn(problem)
        if (reason := refusal(restored.values, self._manifest)) is not None:
            raise CheckpointError(
                f"{restored.path} {reason}; go on with the settings it was started with, say "
                "--fresh to put it aside (murmur swarm: without --resume), or choose another --out"
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
        """Has signals end the run in good order, all but SIGINT without an evaluation; a second one
        at once. Once all is done, SIGTERM changes nothing any more."""

        def stop(number: int, _frame: FrameType | None) -> None:
            if self._interrupted_by is not None:
                if signal.Signals(number).name == "SIGHUP":  # systemd sends both at once
                    return
                os._exit(128 + number)
            self._interrupted_by = number
            self._code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.DONE
            self._mailbox.answer(Stop(signal.Signals(number).name))

        before = {n: signal.signal(n, stop) for n in ending_signals()}
        try:
            yield
        finally:
            if self._done:
                before[signal.SIGTERM] = signal.SIG_IGN
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self) -> None:
        """Leaves on a notice that the machine goes away; a signal may still follow. any thread."""
        self._noticed = True
        self._log(new_event("preempted", source=str(self._options.leave_on)))
        self._mailbox.answer(Stop("preempted"))

    @property
    def _leaves(self) -> bool:
        """Tells whether somebody waits for this process to end."""
        return self._noticed or self._interrupted_by is not None

    def _snapshot(
        self, trainer: Trainer, *, copied: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        left = self._options.node.residuals
        outer = plain_state(trainer, self._manifest, self._session.ask, left)
        tensors, values = snapshot(trainer, outer, self._part.stage, copied=copied)
        if self._shares is not None:
            if trainer.error is None:
                self._shares.tell()
                self._session.settle()
            values["samples"] = self._session.ask(self._options.node.ledger.plain)
        return tensors, values

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
        code = ExitCode.CHECKPOINT if self._saver.failed else self._code
        result = build_result(
            task=self._task,
            config=self._config,
            part=self._part,
            trainer=trainer,
            io=session.io,
            whole=whole,
            saved=self._saver.path,
            hurried=lambda: self._noticed or self._interrupted_by not in (None, signal.SIGINT),
        )
        result["exit_code"] = code
        leave_json(self._options.out / "result.json", result, self._log)
        event = new_event("result", **result)
        session.complete(event)
        self._mailbox.post(TrainingEvent(dict(event)))
        patience_s = 0.0 if trainer.stopped is not None else AWAIT_OTHERS_S
        wanted = lambda: not self._leaves or not patience_s  # noqa: E731
        results = session.share_result(event, patience_s, wanted)
        leave_json(self._options.out / RESULTS, results, self._log)
        self._done = True
        return code
