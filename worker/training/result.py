"""The last words of a worker, as plain values: its `result` event and `result.json`."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from murmuration.worker.config import Config
from murmuration.worker.pipeline.part import Part, WholeModel
from murmuration.worker.pipeline.stage_node import StageNode
from murmuration.worker.tasks import Task
from murmuration.worker.training.evaluation import Evaluation, generate_sample, validate
from murmuration.worker.training.kseed import seed_space_of
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import IOThread
from murmuration.worker.transport import Method
from murmuration.worker.wire import tensor_hash

_LAST_WORDS_S = 3.0
_NOT_EVALUATED: Mapping[str, object] = {"val_loss": None, "val_loss_error": None, "val_metrics": {}}
_EXCHANGES = (Method.EXCHANGE, Method.AVERAGE, Method.PAIR_ROUND)


def build_result(
    *,
    task: Task,
    config: Config,
    part: Part,
    trainer: Trainer,
    io: IOThread,
    whole: WholeModel | None,
    saved: Path | None,
    hurried: Callable[[], bool],
) -> dict[str, object]:
    """Evaluates the anchors and collects all figures, when the last checkpoint is saved: the model
    holds the anchors then. train thread only. Args: part: what this worker trained; a stage alone
    has no loss and writes no text; whole: what this worker has put together of all stages, if it
    was the one to; saved: the last checkpoint; hurried: whether somebody waits for this process to
    end: then nothing is evaluated."""
    node, metrics = io.node, trainer.metrics
    fragments, space = [each.fragment for each in trainer.fragments], seed_space_of(part.module)
    params = sum(f.elements for f in fragments) if space is None else space.elements
    members, counts = io.ask(lambda: node.gossip.members), node.context.counts
    peers = sum(part.stage is None or member.stage == part.stage for member in members)
    # Ctrl-C is of somebody that looks on: then what is quick.
    until_s = time.monotonic() + (math.inf if trainer.stopped is None else _LAST_WORDS_S)
    wanted = lambda: not hurried() and time.monotonic() <= until_s  # noqa: E731
    found, sample = _evaluate(task, config, part, trainer, whole, wanted)
    result = {
        "preset": config.preset,
        "inner_steps": config.plan.inner_steps,
        "run_steps": config.run.steps,
        "seed": config.run.seed,
        "params": params,
        "fragments": len(fragments),
        "step": trainer.step,
        "steps": metrics.inner_steps,
        "reason": "finished" if trainer.stopped is None else trainer.stopped.reason,
        **(_NOT_EVALUATED if found is None else found.plain()),
        "loss_unit": getattr(task, "loss_unit", None),
        "sample": sample,
        "train_loss_curve": metrics.curve,
        "val_loss_curve": metrics.val_curve,
        **metrics.plain(),
        "payload_bytes_sent": counts.payload_sent_bytes,
        "payload_bytes_received": counts.payload_received_bytes,
        "traffic": {
            "contributions": asdict(counts.contributions_sent),
            "reductions": asdict(counts.reductions_sent),
            "final_mean": asdict(counts.final_mean_sent),
        },
        "blocked_s": round(counts.blocked_s, 3),
        "ddp_bytes": round(2 * (peers - 1) / peers * 4 * params * metrics.inner_steps),
        "spread": trainer.spread,
        "anchor_hash": tensor_hash(state.anchor for state in trainer.states),
        "momentum_hash": tensor_hash(state.momentum for state in trainer.states),
        "checkpoint": str(saved) if saved else None,
        "loop_lag_ms": io.ask(node.lag.summary_ms),
        "verdicts": io.ask(node.locator.history),
        "warnings": io.ask(lambda: list(node.warnings)),
    }
    if config.plan.consensus:
        method = Method.AVERAGE if config.plan.keeps else Method.EXCHANGE
        result["final_mean_bytes"] = node.transport.traffic.sent[method]
    if (stages := node.stages) is not None:
        result |= io.ask(lambda: _of_stage(config, stages))
        result |= {**metrics.iterations(), **metrics.waits()}
        result["assembled"] = str(whole.path) if whole is not None else None
    return result


def _evaluate(
    task: Task,
    config: Config,
    part: Part,
    trainer: Trainer,
    whole: WholeModel | None,
    wanted: Callable[[], bool],
) -> tuple[Evaluation | None, str | None]:
    """Validation and a sample of the anchors; None without a whole model, or once not wanted."""
    if not wanted():
        return None, None
    if whole is not None:
        model = task.model()
        model.load_state_dict(dict(whole.anchors), strict=False)
    elif part.stage is None:
        model = part.module
    else:
        return None, None
    trainer.report("evaluating")
    for each in trainer.fragments:  # the local parameters are saved, and not needed any more
        each.write(each.state.anchor)
    found = validate(task, model, config.run.seed, wanted)
    return found, generate_sample(task, model, config.run.seed) if wanted() else None


def _of_stage(config: Config, stages: StageNode) -> dict[str, object]:
    """Tells of a stage and its calls. io thread only."""
    context, budget = stages.context, stages.context.budget
    sent = context.transport.traffic.sent
    return {
        "stage": context.stage,
        "stages": config.stages.count,
        "routing": config.stages.routing,
        "skip": config.stages.skip,
        "microbatches": config.stages.microbatches,
        "stage_counts": asdict(context.counts),
        "in_flight_peak_bytes": budget.peak_bytes,
        "in_flight_limit_bytes": budget.limit_bytes,
        "activation_bytes_sent": sent[Method.STAGE_CALL],
        "exchange_bytes_sent": sum(sent[method] for method in _EXCHANGES),
    }
