"""The same steps by one process, or by ranks that each take their part of every batch.

    python -m tests.support.site_loop STEPS [one cuda] [--preset onebit --join HOST:PORT ...]
    torchrun --nproc-per-node 2 -m tests.support.site_loop STEPS fsdp|hsdp|tp|ddp [cuda] [...]

Rank 0 prints as JSON the final parameters, after which steps ranks have exchanged anything, and the
hashes of anchors and momenta where the loop begins and ends. With `--load FOLDER` it begins with a
checkpoint of torch's, and with `--save STEP FOLDER` it ends with one.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import murmuration
from murmuration.worker.wire import tensor_hash
from tests.support.fork_server import ForkedPopen
from tests.support.workers import PATIENCE_S, free_addresses, wait_until_listens

OVERLAPS = {"streaming": 1, "streaming-noloco": 1, "co2": 4, "onebit": 1, "sparse": 1}


def python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return ForkedPopen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def site_of(ranks: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """So many processes, as torchrun starts them."""
    (address,) = free_addresses(1)
    host, port = address.split(":")
    shared = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}
    shared["WORLD_SIZE"], numbers = str(ranks), map(str, range(ranks))
    return [python(*arguments, **shared, RANK=each, LOCAL_RANK=each) for each in numbers]


def printed(*processes: subprocess.Popen[str]) -> str:
    try:
        said = [process.communicate(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, said
    return "".join(out for out, _ in said)


def loop_of(preset: str, kind: str, ranks: int, *more: str) -> list[subprocess.Popen[str]]:
    """Such a loop of 11 steps, as a peer."""
    overlap = json.dumps({"diloco.overlap_steps": OVERLAPS.get(preset, 0)})
    peer = (kind, "--preset", preset, "--settings", overlap, *more)
    return site_of(ranks, "-m", "tests.support.site_loop", "11", *peer)


def two_sites(preset: str, kind: str = "one", ranks: int = 1) -> list[list[float]]:
    """The final parameters of both, each with samples of its own."""
    (address,) = free_addresses(1)
    beginning = ("--name", "a", "--listen", address, "--min-peers", "2")
    first = loop_of(preset, kind, ranks, *beginning)
    wait_until_listens(address)
    second = loop_of(preset, kind, ranks, "--name", "b", "--join", address, "--samples", "1")
    lines = printed(*first, *second).splitlines()
    return [json.loads(line)["values"] for line in lines if line.startswith("{")]


def wrapped(model: nn.Sequential, kind: str) -> nn.Module:
    """Sharded over all ranks; over pairs of them, which are replicas (`hsdp`) or share each layer
    (`tp`); or replicated."""
    if kind == "ddp":
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # as channels_last is
        return DistributedDataParallel(model)
    if kind == "fsdp":
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":
        return fully_shard(model, mesh=mesh)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["inner"], plan), mesh=mesh["outer"])


class Trained:
    """Model and optimizers, as torch saves them for any number of ranks."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._of = model, optimizers

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizers"), get_state_dict(*self._of), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizers = state["model"], state["optimizers"]
        set_state_dict(*self._of, model_state_dict=model, optim_state_dict=optimizers)


def outer_hashes(swarm: murmuration.Swarm) -> list[str]:
    return [tensor_hash(each.values()) for each in swarm.state_dict().get("fragments", ())]


def main() -> None:
    """Trains with two optimizers, momentum and clipping, a round every four steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument(
        "kind", choices=["one", "ddp", "fsdp", "hsdp", "tp"], nargs="?", default="one"
    )
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--preset")
    parser.add_argument("--settings", type=json.loads, help="as JSON")
    parser.add_argument("--samples", type=int, default=0, help="a seed for the data")
    parser.add_argument("--load")
    parser.add_argument("--save", nargs=2, metavar=("STEP", "FOLDER"), default=("11", ""))
    murmuration.add_arguments(parser)
    options = vars(parser.parse_args())
    kind, device, samples = (options.pop(name) for name in ("kind", "device", "samples"))
    load, (last, save) = options.pop("load"), options.pop("save")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    torch.manual_seed(samples)
    inputs, targets = torch.randn(8, 20, 6), torch.randn(8, 20, 3)
    model, inputs, targets = (each.to(device) for each in (model, inputs, targets))
    rank, ranks = 0, 1
    if kind != "one":
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = wrapped(model, kind)
    part, parts = (rank // 2, ranks // 2) if kind == "tp" else (rank, ranks)
    dist.send_object_list = words = Mock(wraps=dist.send_object_list)
    met = list[int]()
    first, *rest = model.parameters()
    optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in ([first], rest)]
    swarm = murmuration.Swarm(model, optimizers, inner_steps=4, **options)
    checkpointed = {"trained": Trained(model, optimizers), "swarm": swarm}
    if load:
        dcp.load(checkpointed, checkpoint_id=load)
    hashes = [outer_hashes(swarm)]
    with swarm:
        while swarm.step < int(last):
            chosen, before = swarm.step % 8, words.call_count
            mine = slice(part * 20 // parts, (part + 1) * 20 // parts)
            loss = (model(inputs[chosen, mine]) - targets[chosen, mine]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if words.call_count > before:
                met.append(swarm.step)
        if save:
            dcp.async_save(checkpointed, checkpoint_id=save).result()
        hashes.append(outer_hashes(swarm))
        with swarm.anchor():
            pass
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    values = [value for p in whole for value in p.flatten().tolist()]
    if rank == 0:
        print(json.dumps({"values": values, "met": met, "hashes": hashes}))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
