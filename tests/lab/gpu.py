"""Runs the library on a card: one call proves it or breaks it, and says how fast it is.

    python -m tests.lab gpu [--only NAME ...] [--minutes 9.5] [--device cuda] [--results FILE]

A line for each check, and all figures in one file of JSON, by device. What is there and has not
failed is not run again, so that a call that was cut off goes on. `--only` takes the beginnings of
names. Without a card the same checks run on the CPU at small sizes, which only tries the script.
A check has `missed` where all runs, and a figure is not what was asked for.

swarm     anchors beside the CPU's: fp32, bf16, autocast, compiled, fused, in CUDA graphs
codecs    the same bytes and values on both
stages    copies, encoding, means, outer step and hash of a fragment, one by one
site      two ranks of torchrun with Gloo beside one process
encode    encoding where the parameters are beside encoding on the host
overlap   steps with a round in flight beside a plain loop's; the other peer is on the CPU
losses    four workers in one process: alone, data-parallel, and two presets

Each check runs in a fresh process once one has failed on a card.
"""

import argparse
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import murmuration
from murmuration.algorithms.codecs import CODECS, codec_by_name
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import PRESETS
from murmuration.worker import wire
from murmuration.worker.tasks.llama import LlamaConfig, build_llama
from murmuration.worker.training import device as devices
from murmuration.worker.training.fragment import FragmentReplica, _prepared
from murmuration.worker.training.mailbox import RoundDone
from tests.lab.one_process import Training, train
from tests.support.workers import free_addresses

Figures = dict[str, Any]
_ROOT = Path(__file__).parents[2]
_PROGRAM = (sys.executable, "-m", "tests.lab.gpu")
_MISSED = "missed"  # the figure that says what was asked for and is not so
_NEXT = 3  # the exit code that asks for a fresh process
_PATIENCE_S = 180.0  # of a check
_SLOWER = 1.02  # a step with a round in flight, of a plain one
_PEERS, _FREE = 2, 4  # that exchange; steps of a plain loop before it is timed
# Width, layers.
SIZES = {"tiny": (32, 2), "10m": (384, 6), "30m": (512, 10), "100m": (768, 14), "500m": (1536, 18)}
OVERLAPS = ("streaming", "onebit", "sparse", "streaming-noloco", "diloco", "noloco")
LARGE = ("streaming", "onebit", "diloco")  # at 500 million
LINES = {"alone": "local", "ddp": "local", "streaming": "streaming", "onebit": "onebit"}


class Skipped(Exception):
    """The check is of something that is not here."""


@dataclass(frozen=True)
class Place:
    """Where a check runs. Args: others: processes beside this one."""

    device: torch.device
    others: Executor

    @property
    def small(self) -> bool:
        """Tells whether the script is tried, not a card."""
        return self.device.type == "cpu"

    def synchronize(self) -> None:
        """Waits for all that the device was given."""
        if not self.small:
            torch.accelerator.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """The median, the first time left out."""
        took_s = []
        for _ in range((2 if self.small else 5) + 1):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            took_s.append(time.perf_counter() - began)
        return statistics.median(took_s[1:])


def architecture(size: str) -> dict[str, int]:
    """Fields of `LlamaConfig`."""
    width, layers = SIZES[size]
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), max(2, width // 64))
    mlp = width * 8 // 3
    return {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, **heads}


def decoder(size: str, context: int) -> nn.Module:
    """A decoder with the values of seed 0, on the CPU in fp32."""
    return build_llama(LlamaConfig(max_position_embeddings=context, **architecture(size)), 0)


def tokens_of(count: int, batch: int, context: int, device: torch.device) -> Tensor:
    """Bytes at random: int64 (count, batch, context + 1)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, batch, context + 1), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def flat(model: nn.Module) -> Tensor:
    """All parameters, 1-D fp32 on the CPU."""
    return torch.cat([p.detach().cpu().float().flatten() for p in model.parameters()])


# ------------------------------------------------------------------------------------------ swarm


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def fused(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=3e-3, fused=True)]


def as_nanochat(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of layers, AdamW for the rest."""
    layers = {id(p): p for n, p in model.named_parameters() if "layers" in n and p.dim() == 2}
    muon = murmuration.Muon(list(layers.values()), lr=0.02, momentum=0.95, weight_decay=0.0)
    rest = [p for p in model.parameters() if id(p) not in layers]
    return [muon, AdamW(rest, lr=3e-3, fused=True)]


@dataclass(frozen=True)
class Way:
    """A way to train. Args: far: of the CPU's anchors, at most, relative to how far it has trained;
    scaled: by a GradScaler, which meets one infinite loss."""

    optimizers: Callable[[nn.Module], list[Optimizer]] = sgd
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    scaled: bool = False
    compiled: bool = False
    graphed: bool = False
    far: float = 0.3


WAYS = {
    "fp32": Way(far=1e-3),
    "bf16": Way(dtype=torch.bfloat16),
    "autocast": Way(autocast=True, scaled=True),
    "fused": Way(fused, autocast=True, scaled=True),
    "nanochat": Way(as_nanochat, autocast=True),
    "compiled": Way(compiled=True, far=1e-2),
    "graphs": Way(graphed=True, far=1e-3),
}


def swarm(way: Way, at: Place) -> Figures:
    """One peer trains as this way has it, on the device and on the CPU."""
    if way.graphed and at.device.type != "cuda":
        raise Skipped("CUDA graphs are of CUDA")
    began = time.perf_counter()
    there, first, skipped = trained(way, at.device)
    took_s = time.perf_counter() - began
    # The CPU is asked for the same values, not for a graph of them.
    plain = replace(way, compiled=False, graphed=False)
    here, _, _ = trained(plain, torch.device("cpu"))
    far = float((there - here).norm() / (here - first).norm())
    figures = {"far": far, "trained_s": took_s, "skipped_steps": skipped}
    return figures if far <= way.far else {**figures, _MISSED: f"at most {way.far:g} far"}


def trained(way: Way, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """(parameters at the end, at the beginning, steps that the scaler skipped)."""
    model = decoder("tiny", 32).to(device, way.dtype)
    first, tokens = flat(model), tokens_of(12, 4, 32, device)
    optimizers = way.optimizers(model)
    scaler = torch.amp.GradScaler(device.type, enabled=way.scaled)
    half = torch.float16 if way.scaled and device.type == "cuda" else torch.bfloat16
    compiler = "eager" if device.type == "cpu" else "inductor"
    forward = torch.compile(model, backend=compiler) if way.compiled else model
    backward = graph_of(model, tokens[0], optimizers) if way.graphed else None
    settings = {"diloco.overlap_steps": 1, "diloco.codec": "bf16", "diloco.reduction_codec": "bf16"}
    taken = skipped = 0
    with murmuration.Swarm(
        model, optimizers, preset="streaming", inner_steps=4, steps=12, settings=settings
    ) as peer:
        while not peer.done:
            chosen = tokens[peer.step]
            if backward is not None:
                backward(chosen)
            else:
                with torch.autocast(device.type, half) if way.autocast else nullcontext():
                    loss = loss_of(forward, chosen)
                scaler.scale(loss * (torch.inf if way.scaled and taken == 5 else 1)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            taken, skipped = taken + 1, skipped + (scaler.get_scale() < before)
            for optimizer in () if way.graphed else optimizers:
                optimizer.zero_grad()
        rounds = peer.metrics["rounds_completed"]
    assert taken - skipped == 12, f"{taken} steps, {skipped} skipped, and 12 are of the run"
    assert skipped > 0 or not way.scaled, "no step was skipped"
    assert rounds, "no round"
    return flat(model), first, skipped


def graph_of(model: nn.Module, tokens: Tensor, made: Sequence[Optimizer]) -> Callable[..., None]:
    """Forward and backward in a CUDA graph, of other tokens of the same shape."""
    static, side = tokens.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_of(model, static).backward()
    torch.cuda.current_stream().wait_stream(side)
    for optimizer in made:
        optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_of(model, static).backward()

    def replayed(chosen: Tensor) -> None:
        static.copy_(chosen)
        graph.replay()

    return replayed


def graphed_step(at: Place) -> Figures:
    """An optimizer's step in a CUDA graph is refused in one line."""
    if at.device.type != "cuda":
        raise Skipped("CUDA graphs are of CUDA")
    model = nn.Linear(4, 4, device=at.device)
    optimizer = AdamW(model.parameters(), capturable=True)
    with murmuration.Swarm(model, optimizer, inner_steps=4, steps=8):
        model(torch.ones(4, 4, device=at.device)).sum().backward()
        optimizer.step()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                optimizer.step()
        except murmuration.UsageError as error:
            return {"said": str(error)}
    return {_MISSED: "a step in a CUDA graph is refused"}


def two_peers(at: Place) -> Figures:
    """Two processes on one card end with the same bits."""
    address, began = free_addresses(1)[0], time.perf_counter()
    found = at.others.map(partial(peer, address, str(at.device)), range(_PEERS))
    (one, rounds), (other, _) = found
    figures = {"rounds": rounds, "seconds_together": time.perf_counter() - began}
    return figures if one == other else {**figures, _MISSED: "both end with the same bits"}


def peer(address: str, device: str, index: int) -> tuple[str, int]:
    """A process of its own: (hash of what it ends with, its rounds)."""
    model = decoder("tiny", 32).to(device)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    tokens = tokens_of(12 * _PEERS, 4, 32, torch.device(device))
    meet: Figures = {"join": address} if index else {"listen": address, "min_peers": _PEERS}
    with murmuration.Swarm(model, optimizer, inner_steps=4, steps=12, **meet) as run:
        while not run.done:
            loss_of(model, tokens[run.step * _PEERS + index]).backward()
            optimizer.step()
            optimizer.zero_grad()
        rounds = run.metrics["rounds_completed"]
    assert isinstance(rounds, int)
    return wire.tensor_hash([flat(model)]), rounds


# -------------------------------------------------------------------------------- codecs, encoding


def codecs(at: Place) -> Figures:
    """Every codec on the device and on the CPU."""
    values = torch.randn(100_003 if at.small else 10_000_019)
    values *= values.roll(1) ** 5  # of many sizes; some are zero, equal, or below 2^-126
    values[1000:9000] = 0.0
    values[20000:30000].sign_()
    values[40000:41000] *= 2.0**-130
    there, different = values.to(at.device), []
    for codec in CODECS:
        here, raw = codec.encode(values), codec.encode(there)
        same = torch.equal(here, raw.cpu()) and torch.equal(
            codec.decode(here, len(values)), codec.decode(raw, len(values)).cpu()
        )
        different += [] if same else [codec.name]
    same_as = {"codecs": len(CODECS), "values": len(values)}
    return {**same_as, _MISSED: f"the same from {', '.join(different)}"} if different else same_as


def encode(name: str, at: Place) -> Figures:
    """GB/s of fp32 on the host and on the device, with and without the copy to the host."""
    codec, gb = codec_by_name(name), (1 << 18 if at.small else 1 << 26) * 4 / 1e9
    values = torch.randn(int(gb * 1e9 / 4))
    there, want = values.to(at.device), codec.encode(values)
    figures: Figures = {
        "host_gb_s": gb / at.seconds(lambda: codec.encode(values)),
        "copy_and_host_gb_s": gb / at.seconds(lambda: codec.encode(there.cpu())),
        "device_gb_s": gb / at.seconds(lambda: codec.encode(there)),
        "device_and_copy_gb_s": gb / at.seconds(lambda: codec.encode(there).cpu()),
        "device_same_bytes": torch.equal(codec.encode(there).cpu(), want),
    }
    return figures if figures["device_same_bytes"] else {**figures, _MISSED: "the same bytes"}


def stages(at: Place) -> Figures:
    """The stages of a round of one fragment in this process, one at a time."""
    side, count = (256, 4) if at.small else (2048, 16)
    there = {f"{n}": torch.randn(side, side, device=at.device) for n in range(count)}
    fragment = Fragment(0, tuple(TensorSpec(name, (side, side)) for name in there))
    plan, codec = PRESETS["streaming"], codec_by_name("e3m0")
    each, here = FragmentReplica(fragment, plan, there), list(there.values())
    start, g = each.state.anchor, torch.randn(fragment.elements)
    payload = memoryview(bytearray(wire.encode(codec, g)))
    mean = wire.decode(codec, payload, fragment.elements)

    def closed() -> RoundDone:
        each.contribute(g, 1)
        return RoundDone(each.state.version, mean, _PEERS, ("a", "b"), (), fragment=0)

    work: dict[str, Callable[[], object]] = {
        "finite": lambda: each.is_finite,
        "local": lambda: each.local,
        "learned": each.learned,
        "encode": lambda: wire.encode(codec, g),
        "mean": lambda: wire.average(codec, [payload] * _PEERS, fragment.elements),
        "decode": lambda: wire.decode(codec, payload, fragment.elements),
        "hash": lambda: wire.state_hash(start, g, ()),
        "outer": lambda: _prepared(each.outcome(closed()), here),
        "pinned": lambda: devices.pinned(g, here),
        "write": lambda: each.write(g),
        "pageable_read": lambda: [p.cpu() for p in here],
    }
    gb = fragment.elements * 4 / 1e9
    figures = {f"{name}_ms": round(1e3 * at.seconds(one), 3) for name, one in work.items()}
    took_ms = []
    for _ in range(2 if at.small else 5):  # its outer step was made beside inner steps
        each.handle(done := closed())
        _prepared(each.outcome(done), here)  # takes longer
        at.synchronize()
        began = time.perf_counter()
        each.finish(done)
        took_ms.append([1e3 * (time.perf_counter() - began)])
        at.synchronize()
        took_ms[-1].append(1e3 * (time.perf_counter() - began))
    ordered, done_ms = (statistics.median(each) for each in zip(*took_ms, strict=True))
    return {
        "gb": gb,
        **figures,
        "finish_ms": round(ordered, 3),
        "finish_there_ms": round(done_ms, 3),
    }


# ---------------------------------------------------------------------------------------- overlap


def partner(address: str, size: str, context: int) -> None:
    """A process of its own, on the CPU: a peer of the same model that computes next to nothing."""
    torch.set_num_threads(2)
    model = decoder(size, context)
    optimizer = SGD(model.parameters(), lr=0.0)
    next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with murmuration.Swarm(model, optimizer, join=address) as run:
        while not run.done:
            optimizer.step()


def overlap(preset: str, size: str, at: Place) -> Figures:
    """Steps of a loop within a swarm of two beside those of the same loop before it."""
    context, batch = (16, 2) if at.small else (1024, 8)
    plan, address = PRESETS[preset], free_addresses(1)[0]
    meet: Figures = {"preset": preset, "listen": address, "min_peers": _PEERS}
    meet["inner_steps"] = plan.inner_steps if not at.small else 4
    meet["steps"] = max(2 * meet["inner_steps"], 8 if at.small else 40)
    if at.small and plan.overlap_steps:
        meet["settings"] = {"diloco.overlap_steps": 1}
    other = at.others.submit(partner, address, size, context)
    model = decoder(size, context).to(at.device)
    optimizer = AdamW(model.parameters(), lr=0.0, fused=True)  # both begin with the same values
    tokens = tokens_of(8, batch, context, at.device)

    def stepped(number: int) -> float:
        began = time.perf_counter()
        with torch.autocast(at.device.type, torch.bfloat16):
            loss = loss_of(model, tokens[number % 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        at.synchronize()
        return time.perf_counter() - began

    plain = [stepped(number) for number in range(_FREE + (2 if at.small else 16))][_FREE:]
    took: list[tuple[str, float]] = []
    optimizer.param_groups[0]["lr"] = 1e-4
    try:
        with pcie_bytes() as moved, murmuration.Swarm(model, optimizer, **meet) as peer:
            before = flights(peer)
            while not peer.done:
                seconds, now = stepped(peer.step), flights(peer)
                kind = "exchange" if now != before else "in_flight" if any(now[0]) else "idle"
                took.append(("end" if peer.done else kind, 1e3 * seconds))
                before = now
            metrics = peer.metrics
    except murmuration.MurmurError:
        if other.done():
            other.result()  # that one's error says more
        raise
    other.result()
    plain_ms, stall_s = 1e3 * statistics.median(plain), metrics["stall_s"]
    figures: Figures = {"params": sum(p.numel() for p in model.parameters()), "plain_ms": plain_ms}
    for kind in ("idle", "in_flight", "exchange", "end"):
        each_ms = [ms for one, ms in took if one == kind]
        figures[f"{kind}_steps"] = len(each_ms)
        figures[f"{kind}_ms"] = statistics.median(each_ms) if each_ms else None
    training_ms = statistics.fmean(ms for kind, ms in took if kind != "end")
    figures["of_plain"] = training_ms / plain_ms  # the mean of all steps but the last
    figures |= {"stall_s": stall_s, "rounds": metrics["rounds_completed"]}
    figures |= {"pcie_mb": sum(moved) / 1e6, "timeline": [(k, round(ms, 1)) for k, ms in took]}
    flying = figures["in_flight_ms"]
    if not at.small and flying is not None and flying > _SLOWER * plain_ms:
        figures[_MISSED] = f"a step with a round in flight is at most {_SLOWER:g} of a plain one"
    return figures


def flights(peer: Any) -> tuple[list[bool], list[int]]:
    """Tells of each fragment whether a round is in flight, and its version."""
    fragments = peer._loop.fragments
    return [f.in_flight is not None for f in fragments], [f.state.version for f in fragments]


@contextmanager
def pcie_bytes() -> Iterator[list[int]]:
    """The bytes of each fragment that is copied to the host or from it meanwhile, as fp32."""
    found = list[int]()
    there, back = devices.pinned, devices.copy_to_host

    def counted(values: Tensor, like: Sequence[Tensor]) -> Tensor:
        found.append(values.nbytes * like[0].is_cuda)
        return there(values, like)

    def counted_back(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        ordered = list(copies)
        found.extend(source.nbytes * source.is_cuda for _, source in ordered)
        back(ordered)

    devices.pinned, devices.copy_to_host = counted, counted_back
    try:
        yield found
    finally:
        devices.pinned, devices.copy_to_host = there, back


# ------------------------------------------------------------------------------------ site, losses


def site(kind: str, at: Place) -> Figures:
    """Two ranks on one device beside one process."""
    module = ("-m", "tests.support.site_loop", "11")
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    port, said = free_addresses(1)[0].rpartition(":")[2], []
    for command in (
        (*module, "one", at.device.type),
        (*ranks, "--master-port", port, *module, kind, at.device.type),
    ):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, cwd=_ROOT
        )
        if done.returncode:
            raised = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)", done.stderr, re.M)
            raise RuntimeError(raised[0] if raised else done.stderr[-200:])
        said.append(done.stdout)
    one, two = (torch.tensor(json.loads(text)["values"]) for text in said)
    far = float((one - two).abs().max())
    return {"far": far} if far < 1e-5 else {"far": far, _MISSED: "at most 1e-5 far"}


def losses(line: str, size: str, at: Place) -> Figures:
    """The loss after some steps of a line, on Python's own sources."""
    workers, steps = (2, 8) if at.small else (4, {"10m": 300, "30m": 200}.get(size, 100))
    sizes = ",".join(f"{key}={value}" for key, value in architecture(size).items())
    settings = [f"task.architecture={{{sizes}}}", "inner.lr=0.001", "inner.optimizer='adamw'"]
    settings += [f"task.batch_size={2 if at.small else 8}"]
    settings += [f"task.context_bytes={16 if at.small else 256}", "inner.precision='bf16'"]
    if line == "ddp":  # the mean gradient of as many batches
        settings.append(f"inner.accumulate={workers}")
    if at.small and line == LINES[line]:
        settings += ["diloco.inner_steps=4", "diloco.overlap_steps=1"]
    began = time.perf_counter()
    done = train(
        Training(
            preset=LINES[line],
            settings=tuple(settings),
            steps=steps,
            workers=workers,
            seed=0,
            device=str(at.device),
        )
    )
    return {
        "loss": done.loss_of(done.anchors(), 2 if at.small else 16),
        "params": sum(fragment.elements for fragment in done.fragments),
        "steps": steps,
        "workers": workers,
        "mb_sent": done.sent_bytes / 1e6,
        "trained_s": time.perf_counter() - began,
    }


# --------------------------------------------------------------------------------------- the list

Check = Callable[[Place], Figures]


def checks(small: bool) -> dict[str, Check]:
    found: dict[str, Check] = {f"swarm-{n}": partial(swarm, way) for n, way in WAYS.items()}
    found |= {"swarm-graphed-step": graphed_step, "swarm-two": two_peers}
    found |= {"codecs": codecs, "stages": stages}
    found |= {f"site-{kind}": partial(site, kind) for kind in ("ddp", "fsdp")}
    found |= {f"encode-{n}": partial(encode, n) for n in ("sign", "e3m0", "topk128")}
    first = "tiny" if small else "100m"
    found |= {f"overlap-{first}-{n}": partial(overlap, n, first) for n in OVERLAPS}
    for size in ("tiny",) if small else ("10m", "30m", "100m"):
        found |= {f"losses-{size}-{line}": partial(losses, line, size) for line in LINES}
    found |= {} if small else {f"overlap-500m-{n}": partial(overlap, n, "500m") for n in LARGE}
    return found


class Results:
    """The file of figures: by device, by check."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.device = f"{card}, torch {torch.__version__}"

    @property
    def found(self) -> dict[str, Figures]:
        return self._all().get(self.device, {})

    def add(self, name: str, figures: Mapping[str, Any]) -> None:
        """Writes it at once; prints its line."""
        whole = self._all()
        whole.setdefault(self.device, {})[name] = figures
        self._write(whole)
        print(line_of(name, figures), flush=True)

    def forget_failed(self, names: Sequence[str]) -> None:
        """They are run again."""
        whole = self._all()
        for name in names:
            if whole.get(self.device, {}).get(name, {}).get("result") == "failed":
                del whole[self.device][name]
        self._write(whole)

    def _write(self, whole: Figures) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(whole, indent=1))
        fresh.replace(self._path)

    def _all(self) -> dict[str, dict[str, Figures]]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}


def line_of(name: str, figures: Mapping[str, Any]) -> str:
    told = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in figures.items()
        if key not in ("result", "seconds", "timeline")
    ]
    return f"{name:<28} {figures['result']:<8} {figures['seconds']:6.1f} s  {', '.join(told)}"


def quiet(device: torch.device) -> None:
    """Hides a swarm's words, which are of no interest here; a small model wants one thread."""
    logging.basicConfig(level=logging.ERROR)
    if device.type == "cpu":
        torch.set_num_threads(1)


def run_checks(names: Sequence[str], device: torch.device, results: Results) -> None:
    """A process of its own. Ends after a check that fails on a card."""
    todo = checks(device.type == "cpu")
    quiet(device)
    with ProcessPoolExecutor(_PEERS, get_context("spawn"), quiet, (device,)) as others:
        for name in names:
            began = time.perf_counter()
            try:
                figures = todo[name](Place(device, others))
                figures["result"] = "missed" if _MISSED in figures else "passed"
            except Skipped as error:
                figures = {"result": "skipped", "error": str(error)}
            except Exception as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                figures = {"result": "failed", "error": said}
                traceback.print_exc()
            if device.type == "cuda":
                figures["card_gb"] = torch.cuda.max_memory_allocated() / 1e9
                torch.cuda.reset_peak_memory_stats()
            results.add(name, {**figures, "seconds": time.perf_counter() - began})
            if figures["result"] == "failed" and device.type != "cpu":
                os._exit(_NEXT)  # neither the card nor the other processes may be waited for


def supervise(names: Sequence[str], options: argparse.Namespace, results: Results) -> list[str]:
    """Runs the checks in one process after another; returns those that there was no time for."""
    ends, left = time.monotonic() + 60 * options.minutes, list(names)
    own = [*_PROGRAM, "--device", options.device, "--results", str(options.results.resolve())]
    own.append("--run")
    while left and time.monotonic() < ends:
        child = subprocess.Popen([*own, *left], start_new_session=True, cwd=_ROOT)
        patience = time.monotonic() + _PATIENCE_S
        while left and child.poll() is None and time.monotonic() < min(ends, patience):
            time.sleep(0.1)  # between two looks at its results
            if left[0] in (done := results.found):
                left = [name for name in left if name not in done]
                patience = time.monotonic() + _PATIENCE_S
        ended = child.poll()
        with suppress(ProcessLookupError):  # what it has started goes with it
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        left = [name for name in left if name not in results.found]
        if left and ended not in (0, _NEXT) and time.monotonic() < ends:
            why = f"no end within {_PATIENCE_S:g} s" if ended is None else f"exit code {ended}"
            results.add(left.pop(0), {"result": "failed", "error": why, "seconds": 0.0})
    return left


def main() -> int:
    """Runs what is not done; 0 if all that was asked for passes, or is of what is not here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--minutes", type=float, default=9.5, help="at most")
    parser.add_argument("--device", help="by default the accelerator that torch sees, else the CPU")
    parser.add_argument("--results", type=Path, default=Path("runs/gpu.json"))
    parser.add_argument("--run", nargs="+", metavar="CHECK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        device = devices.chosen_device(options.device or "auto")
    except Exception as error:  # no such device
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    options.device, results = str(device), Results(options.results, device)
    if options.run:
        run_checks(options.run, device, results)
        return 0
    known = checks(device.type == "cpu")
    asked = [name for name in known if name.startswith(tuple(options.only))]
    if not asked:
        print(f"gpu: no check is named so; there are {', '.join(known)}", file=sys.stderr)
        return 2
    results.forget_failed(asked)
    only = "; no card: small sizes, which try the script" if device.type == "cpu" else ""
    print(f"{results.device}{only}", flush=True)
    left = supervise([name for name in asked if name not in results.found], options, results)
    ended = {name: figures["result"] for name, figures in results.found.items() if name in asked}
    failed = [name for name, end in ended.items() if end in ("failed", "missed")]
    print(f"{len(asked) - len(failed) - len(left)} of {len(asked)} hold; {options.results}")
    for names, what in ((failed, "failed"), (left, "no time was left for")):
        if names:
            print(f"{what}: {' '.join(names)}")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
