"""The composition root: starts the I/O thread, trains on this one, and ends both in good order."""

import asyncio
import concurrent.futures
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor

from algorithms.fragments import TensorSpec, partition
from worker import checkpoint
from worker.config import Config
from worker.errors import EXIT_INTERRUPTED, CheckpointError, ConfigError
from worker.evaluation import anchors_loaded, generate_sample, validation_loss
from worker.iothread import IOThread
from worker.mailbox import Mailbox, Progress, Stop
from worker.manifest import Manifest, first_difference
from worker.membership import Phase
from worker.node import Node, NodeConfig
from worker.snapshot import initial_state, restore_trainer, snapshot
from worker.stages.assembly import fetch_stages, save_whole, stage_fragments, whole_model
from worker.stages.part import part_of
from worker.tasks import Cursor, Task, load_task
from worker.train import Trainer
from worker.transport import Transport
from worker.transport.grpc import GrpcTransport
from worker.wire import tensor_hash

T = TypeVar("T")

_SETTLE_S = 30.0
_LAST_WORDS_S = 3.0


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Args:
    node: name, addresses and whom to wait for.
    listen: `host:port` to serve.
    proxy: `host:port` of an HTTP CONNECT proxy to reach others through.
    out: folder for checkpoints, `events.jsonl` and `result.json`.
    resume: go on from the newest checkpoint in `out`.
    announce: takes each event, for the terminal or a supervisor.
    """

    node: NodeConfig
    listen: str
    out: Path
    resume: bool
    announce: Callable[[dict[str, object]], None]
    proxy: str | None = None


class EventLog:
    """`events.jsonl`, always; and on to whoever listens. any thread."""

    def __init__(self, options: WorkerOptions, enrich: Callable[[dict[str, object]], None]) -> None:
        self._options, self._enrich = options, enrich
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        options.out.mkdir(parents=True, exist_ok=True)
        self._file = (options.out / "events.jsonl").open("a", buffering=1)

    def __call__(self, event: dict[str, object]) -> None:
        event.setdefault("peer", self._options.node.peer)
        event.setdefault("time_s", round(time.monotonic() - self._started_at, 3))
        self._enrich(event)
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + "\n")
            self._options.announce(event)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def run_worker(config: Config, options: WorkerOptions) -> int:
    """Trains until the end, a signal, or an error; returns the exit code. main thread only.

    Raises:
        MurmurError, TaskError, TransportError: one line for the user.
    """
    worker = Worker(config, options)
    return worker.run()


class Worker:
    """One peer's process."""

    def __init__(self, config: Config, options: WorkerOptions) -> None:
        self._config, self._options = config, options
        self._task: Task = load_task(
            config.task.name, seed=config.run.seed, options=config.task.options
        )
        self._part = part_of(self._task, config, options.node.stage)
        self._model = self._part.module
        schema = [
            TensorSpec(name, tuple(parameter.shape))
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        ]
        try:
            self._fragments = partition(schema, config.plan.fragments, config.plan.pattern)
            config.plan.schedule(fragments=len(self._fragments), steps=config.run.steps)
        except ValueError as error:
            raise ConfigError(f"[diloco] {error}") from error
        self._manifest = Manifest.of(config, self._part.whole or schema)
        self._log = EventLog(options, self._add_traffic)
        self._saver = concurrent.futures.ThreadPoolExecutor(1, "murmur-save")
        self._saving: concurrent.futures.Future[None] | None = None
        self._saved_at = time.monotonic()
        self._saved_path: Path | None = None
        self._tokens_per_step = 0
        self._io: IOThread | None = None
        self._transport: Transport = GrpcTransport(options.listen, options.proxy)
        self._mailbox = Mailbox()
        self._interrupted_by: int | None = None

    def run(self) -> int:
        folder = self._options.out / "checkpoints"
        if not self._options.resume:
            checkpoint.set_aside(folder)
        restored = self._restore() if self._options.resume else None
        trainer = self._trainer(restored)
        io = self._io = IOThread(self._make_node, self._mailbox)
        try:
            with self._signals():
                address = io.start()
                self._log({"event": "listening", "address": address, "pid": os.getpid()})
                trainer.run()
                return self._finish(trainer)
        finally:
            io.close()
            self._saver.shutdown()
            self._log.close()

    # ---------------------------------------------------------------------------------- parts

    def _make_node(self) -> Node:
        node = self._options.node
        if self._config.plan.exchange == "none":
            node = replace(node, min_peers=1)  # nothing is exchanged, so nobody is waited for
        return Node(
            node=node,
            config=self._config,
            manifest=self._manifest,
            elements=[fragment.elements for fragment in self._fragments],
            transport=self._transport,
            mailbox=self._mailbox,
            offload=_offload,
            log=self._log,
        )

    def _trainer(self, restored: checkpoint.Checkpoint | None) -> Trainer:
        config = self._config
        cursor = Cursor(seed=config.run.seed, stream=self._options.node.peer)
        if restored is not None:
            cursor = replace(cursor, stream=restored.values["stream"])
            cursor = cursor.advance(restored.values["position"])
        replica = self._part.replica(self._task, config, cursor, self._mailbox)
        states = [initial_state(config.plan, f, replica.parameters) for f in self._fragments]
        trainer = Trainer(
            replica=replica,
            fragments=self._fragments,
            plan=config.plan,
            steps=config.run.steps,
            states=states,
            step=0,
            mailbox=self._mailbox,
            checkpoint=self._checkpoint_now_and_then,
        )
        if restored is not None:
            restore_trainer(trainer, restored)
        return trainer

    def _restore(self) -> checkpoint.Checkpoint:
        restored, problems = checkpoint.load(self._options.out / "checkpoints")
        for problem in problems:
            self._log({"event": "warning", "text": problem})
        there = Manifest(restored.values["manifest"])
        difference = first_difference(there.agreed, self._manifest.agreed)
        if difference:
            raise CheckpointError(
                f"{restored.path} is of another run: {difference} (there: this run's settings); "
                "resume with the settings it was started with, or choose another --out"
            )
        return restored

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in good order; a second one at once."""

        def stop(number: int, _frame: FrameType | None) -> None:
            if self._interrupted_by is not None:
                os._exit(128 + number)
            self._interrupted_by = number
            self._mailbox.answer(Stop(signal.Signals(number).name))

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---------------------------------------------------------------------------- checkpoints

    def _checkpoint_now_and_then(self, trainer: Trainer) -> None:
        now = time.monotonic()
        busy = self._saving is not None and not self._saving.done()
        if now - self._saved_at >= self._config.checkpoint.every_s and not busy:
            self._saved_at = now
            self._saving = self._saver.submit(self._save, trainer.step, *self._snapshot(trainer))

    def _snapshot(self, trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return snapshot(trainer, self._manifest, self._part.stage)

    def _save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        folder = self._options.out / "checkpoints"
        try:
            self._saved_path = checkpoint.save(folder, step, tensors, values)
            checkpoint.prune(folder, self._config.checkpoint.keep)
            self._log({"event": "checkpoint", "path": str(self._saved_path), "step": step})
        except OSError as error:
            self._log({"event": "warning", "text": f"no checkpoint at step {step}: {error}"})

    # ------------------------------------------------------------------------------- the end

    def _finish(self, trainer: Trainer) -> int:
        whole: Mapping[str, Tensor] | None = None
        if trainer.stopped is None and self._config.plan.exchange != "none":
            trainer.settle(self._agreed, _SETTLE_S)
        if trainer.stopped is None and self._part.stage is not None:
            if self._assembles:
                whole = self._assemble(trainer)
            else:
                trainer.settle(lambda: not self._assembler_is_here, _SETTLE_S)
        self._saver.submit(self._save, trainer.step, *self._snapshot(trainer)).result()
        code = EXIT_INTERRUPTED if self._interrupted_by == signal.SIGINT else 0
        result = self._result(trainer, whole)
        result["exit_code"] = code
        (self._options.out / "result.json").write_text(json.dumps(result, indent=1))
        self._mailbox.post(Progress({"event": "result", **result}))
        return code

    def _agreed(self) -> bool:
        """Whether everyone here is done and has what this peer has, where all should."""
        assert self._io is not None
        gossip, plan = self._io.node.gossip, self._config.plan
        one_anchor = plan.exchange != "pairs" or plan.consensus
        others, me = self._io.ask(lambda: (gossip.others, gossip.me))
        return all(
            card.phase is Phase.DONE
            and (card.digests == me.digests or not one_anchor or card.stage != me.stage)
            for card in others
            if card.live and card.phase is not Phase.STARTING
        )

    # ------------------------------------------------------------------- a model in stages

    @property
    def _assembler(self) -> str | None:
        """Who puts the stages together at the end: the first replica of stage 0 that is here."""
        assert self._io is not None
        gossip = self._io.node.gossip
        cards = self._io.ask(lambda: gossip.cards)
        return min((card.peer for card in cards if card.stage == 0 and card.live), default=None)

    @property
    def _assembles(self) -> bool:
        return self._assembler == self._options.node.peer

    @property
    def _assembler_is_here(self) -> bool:
        return self._assembler is not None

    def _assemble(self, trainer: Trainer) -> Mapping[str, Tensor] | None:
        """The whole model, left as a checkpoint; None, and a warning, when a stage is missing."""
        assert self._io is not None
        node, config = self._io.node, self._config
        momenta = config.plan.payload == "pseudo_gradient" and config.plan.exchange != "none"
        expected = {
            stage: {
                f.index: (f.elements, f.elements if momenta else 0)
                for f in stage_fragments(self._task, config, stage)
            }
            for stage in range(1, config.stages.count)
        }
        try:
            anchors = self._io.do(
                lambda: fetch_stages(
                    self._transport, node.gossip.cards, self._manifest.run, expected, _offload
                ),
                _SETTLE_S,
            )
        except TimeoutError:
            anchors = {}
        anchors[0] = [state.anchor for state in trainer.states]
        missing = [stage for stage in range(config.stages.count) if stage not in anchors]
        if missing:
            text = f"no whole model: stage {missing[0]} cannot be fetched from anyone"
            self._log({"event": "warning", "text": text})
            return None
        whole = whole_model(self._task, config, anchors)
        folder = self._options.out / "assembled"
        checkpoint.set_aside(folder)
        path = save_whole(folder, trainer.step, self._manifest, config, whole)
        self._log({"event": "assembled", "path": str(path), "step": trainer.step})
        return whole

    def _add_traffic(self, event: dict[str, object]) -> None:
        if event["event"] in ("progress", "result"):
            event["bytes_sent"] = self._transport.traffic.sent_bytes
            event["bytes_received"] = self._transport.traffic.received_bytes

    def _result(
        self, trainer: Trainer, whole: Mapping[str, Tensor] | None
    ) -> dict[str, object]:
        assert self._io is not None
        node, config, tally = self._io.node, self._config, trainer.tally
        anchors = [state.anchor for state in trainer.states]
        peers = len(node.gossip.cards)
        params = sum(fragment.elements for fragment in self._fragments)
        # Whoever stops a worker waits for it: then only what is quick.
        limit_s = math.inf if trainer.stopped is None else _LAST_WORDS_S
        with anchors_loaded(trainer, self._fragments):
            val_loss = sample = None
            model = self._model if self._part.stage is None else None
            if whole is not None:
                model = self._task.model()
                model.load_state_dict(dict(whole), strict=False)
            if model is not None:
                val_loss = validation_loss(self._task, model, config.run.seed, limit_s)
                sample = generate_sample(self._task, model, config.run.seed)
        counts = node.context.counts
        return {
            "preset": config.preset,
            "inner_steps": config.plan.inner_steps,
            "seed": config.run.seed,
            "params": params,
            "step": trainer.step,
            "steps": tally.inner_steps,
            "reason": "finished" if trainer.stopped is None else trainer.stopped.reason,
            "val_loss": val_loss,
            "sample": sample,
            "train_loss_curve": tally.curve,
            **tally.plain(),
            "payload_bytes_sent": counts.payload_sent_bytes,
            "payload_bytes_received": counts.payload_received_bytes,
            "traffic": {
                "contributions": asdict(counts.contributions_sent),
                "reductions": asdict(counts.reductions_sent),
            },
            "blocked_s": round(counts.blocked_s, 3),
            "payload_bytes_per_round": sum(
                node.context.codec.encoded_bytes(f.elements) for f in self._fragments
            ),
            "ddp_bytes": round(2 * (peers - 1) / peers * 4 * params * tally.inner_steps),
            "spread": trainer.spread,
            "anchor_hash": tensor_hash(anchors),
            "momentum_hash": tensor_hash(state.momentum for state in trainer.states),
            "checkpoint": str(self._saved_path) if self._saved_path else None,
            "loop_lag_ms": self._io.ask(node.lag.summary_ms),
        }


async def _offload(work: Callable[[], T], /) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


def print_line(event: Mapping[str, object]) -> None:
    """One JSON event a line on stdout; a reader that went away is no error."""
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until the end)
