"""A training loop of one's own around the built-in task's model and samples, as a peer of a swarm.

    python -m tests.support.own_loop '{"name": "w0", "preset": "diloco", ...}'

takes the arguments of `murmuration.Swarm` as JSON, with `task` (the TOML's sections of the run's
daemon) and `fails_at` (a step) beside them, and prints what it ends with as JSON.
"""

import json
import sys
from typing import Any

import torch

import murmuration
from worker.config import Config, parse_config, task_of
from worker.tasks import Cursor, next_batch
from worker.wire import tensor_hash


def train(config: Config, arguments: dict[str, Any], fails_at: int) -> dict[str, object]:
    """The inner steps of `worker.training.replica.InnerReplica`, written as people write them."""
    task, inner, steps = task_of(config), config.inner, config.run.steps
    model = task.model()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() >= 2]},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=inner.lr,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        fused=True,
    )
    batches = task.batches("train", Cursor(seed=config.run.seed, stream=arguments["name"]))
    swarm = murmuration.Swarm(model, optimizer, **arguments)
    with swarm:
        print(
            json.dumps({"event": "entered", "step": swarm.step, "peers": swarm.peers}), flush=True
        )
        while not swarm.done:
            batch = next_batch(batches, "train")
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            swarm.report(loss)
            if inner.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            for group in optimizer.param_groups:
                group["lr"] = inner.lr_at(swarm.step + 1, steps)
            if swarm.step == fails_at:
                raise RuntimeError("the loop fails")
            optimizer.step()
    state, figures = swarm.state_dict(), swarm.metrics
    fragments = state["fragments"]
    return {
        "event": "result",
        "run": state["run"],
        "anchor_hash": tensor_hash(each["anchor"] for each in fragments),
        "momentum_hash": tensor_hash(each["momentum"] for each in fragments),
        "model_hash": tensor_hash(p.detach() for p in model.parameters()),
        "rounds_completed": figures["rounds_completed"],
        "rounds_failed": figures["rounds_failed"],
    }


def main() -> None:
    """Prints the result, or the error in one line."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    config = parse_config(given.pop("task"), "the test")
    result = train(config, given, given.pop("fails_at", -1))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
