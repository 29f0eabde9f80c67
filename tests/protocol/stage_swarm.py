"""A swarm whose peers hold a stage each of a tiny Llama, on the virtual clock.

A peer is named by its stage and a letter: "0a" is an origin, "2b" a replica of stage 2.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.config import Config, RunConfig
from murmuration.worker.exchange.measured import ExchangeConfig
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.pipeline.part import Part, part_of
from murmuration.worker.pipeline.stage_call import PeerProcess, StageCallKey
from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.simulation.virtual_loop import VirtualLoop
from murmuration.worker.tasks import Batch, Cursor, StageModule
from murmuration.worker.tasks.llama import next_token_loss
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.training.mailbox import JobKind, StageJob
from murmuration.worker.training.optimizers import InnerConfig
from tests.protocol.swarm import Held, Peer, Swarm
from tests.protocol.train_side import TrainSide

BATCH, CONTEXT, HIDDEN = 1, 12, 16
ACTIVATION_BYTES = 4 * BATCH * CONTEXT * HIDDEN  # of a microbatch, as fp32
HELD_BYTES = 3 * ACTIVATION_BYTES  # by a call
_MIB = 1 << 20
_FORWARDS = {
    JobKind.ENTER: 1.0,
    JobKind.FORWARD: 1.0,
    JobKind.LOSS: 0.25,
    JobKind.BACKWARD: 2.0,
    JobKind.LEAVE: 2.0,
}


@dataclass(frozen=True)
class Iterated:
    """One iteration of a stage's replica: what was counted, and the mean gradient that it gave."""

    iteration: int
    at_s: float
    counted: frozenset[int]
    gradient: Mapping[str, Tensor]
    discarded: bool


class TimedStage(StageReplica):
    """A stage whose jobs take virtual time, and which remembers its iterations."""

    def __init__(
        self,
        *args: Any,
        clock: Callable[[], float],
        forward_s: float,
        computes: Callable[[float], None],
        **jobs: Any,
    ) -> None:
        super().__init__(*args, clock=clock, **jobs)
        self._forward_s, self._computes, self._time = forward_s, computes, clock
        self.iterations: list[Iterated] = []
        self.jobs: Counter[tuple[JobKind, int, int]] = Counter()  # kind, iteration, microbatch
        self.begun = 0
        self._summed: set[int] = set()

    def begin(self, iteration: int) -> None:
        self.begun += 1
        self._summed.clear()
        super().begin(iteration)

    def backward(self, step: int) -> Mapping[str, Tensor]:
        discarded = self._over is not None and self._over.discard
        counted = frozenset() if discarded else frozenset(self._summed)
        mean = super().backward(step)
        assert self.visits == len(counted)
        gradient = {name: value.clone() for name, value in mean.items()}
        self.iterations.append(Iterated(step, self._time(), counted, gradient, discarded))
        return mean

    def _do(self, work: StageJob) -> tuple[memoryview, tuple[int, ...]]:
        self._computes(_FORWARDS[work.kind] * self._forward_s)
        self.jobs[work.kind, work.iteration, work.microbatch] += 1
        done = super()._do(work)
        if work.kind in (JobKind.BACKWARD, JobKind.LEAVE):
            self._summed.add(work.microbatch)
        return done


class _Tiny(LlamaBytes):
    """Knows its sizes by heart: every peer asks for them."""

    @cached_property
    def _layers(self) -> list[int]:
        return super().layer_sizes()

    @cached_property
    def _outer(self) -> int:
        return super().outer_size()

    def layer_sizes(self) -> list[int]:
        return self._layers

    def outer_size(self) -> int:
        return self._outer


class _PlainStage(StageModule):
    """Layers that add a linear map of what enters them: as little to compute as a model can be."""

    def __init__(self, seed: int, layers: range, *, outer: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterDict({str(n): _drawn(seed, n, HIDDEN) for n in layers})
        self.places = _drawn(seed, -2, CONTEXT).detach()  # a longer sample does not fit
        if outer:
            self.outer = _drawn(seed, -1, 256)

    def embed(self, batch: Batch) -> Tensor:
        return torch.nn.functional.embedding(batch.inputs, self.outer)

    def forward(self, hidden: Tensor) -> Tensor:
        for weight in self.layers.values():
            hidden = hidden + (hidden + self.places[: hidden.shape[1]]) @ weight
        return hidden

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        return next_token_loss(hidden @ self.outer.T, batch.targets)


def _drawn(seed: int, place: int, rows: int) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(1000 * seed + place + 2)
    return torch.nn.Parameter(0.1 * torch.randn(rows, HIDDEN, generator=generator))


class _Plain(_Tiny):
    """The same samples, for a model in stages that costs little."""

    def stage(self, first: int, last: int, *, outer: bool) -> Any:
        return _PlainStage(self.seed, range(first, last + 1), outer=outer)


@lru_cache(maxsize=8)
def _task(layers: int, seed: int, kind: type[_Tiny]) -> LlamaBytes:
    architecture = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return kind(
        seed=seed,
        text=os.__file__,  # whatever is written in ours
        batch_size=BATCH,
        context_bytes=CONTEXT,
        architecture=architecture,
    )


@dataclass(frozen=True, kw_only=True)
class StagedProblem:
    """The problem and the settings that all peers of a run in stages share.

    Args:
        cut: layers of each stage; by parameters where none are given.
        forward_s: virtual seconds of a forward, by peer; 0.01 where none is given.
        limits: how many calls fit on a peer; many where none is given.
        plain: whether the model is linear maps, where what is learned is not the matter."""

    count: int = 4
    cut: tuple[int, ...] = ()
    routing: str = "full"
    skip: float = 0.0
    microbatches: int = 4
    layers: int = 4
    steps: int = 4
    plan: Plan = PRESETS["ddp"]
    activations: str = "fp32"
    inner: InnerConfig = field(
        default_factory=lambda: InnerConfig(lr=1e-2, warmup_steps=2, clip=0.0)
    )
    forward_s: Mapping[str, float] = field(default_factory=dict)
    limits: int = 1000
    rebuild: bool = False
    plain: bool = False
    seed: int = 0

    @property
    def config(self) -> Config:
        return Config(
            run=RunConfig(seed=self.seed, steps=self.steps),
            inner=self.inner,
            stages=StagesConfig(
                count=self.count,
                layers=self.cut,
                routing=self.routing,
                skip=self.skip,
                microbatches=self.microbatches,
                activations=self.activations,
                rebuild=self.rebuild,
                memory_mib=self.limits * HELD_BYTES / _MIB,
            ),
            plan=self.plan,
            rounds=RoundConfig(),
            exchange=ExchangeConfig(compression="never"),
            membership=MembershipConfig(),
        )

    @property
    def task(self) -> LlamaBytes:
        return _task(self.layers, self.seed, _Plain if self.plain else _Tiny)

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.of(self.config, part_of(self.task, self.config, 0).whole)

    def cursor(self, peer: str) -> Cursor:
        return Cursor(seed=self.seed, stream=peer)

    def fragments(self, part: Part) -> tuple[Fragment, ...]:
        named = part.module.named_parameters()
        schema = [TensorSpec(name, tuple(values.shape)) for name, values in named]
        return self.config.plan.cut(schema)


def three_stages(steps: int, **changes: Any) -> StagedProblem:
    """Replicas of one stage meet when so many steps are done that this is never."""
    never = replace(PRESETS["diloco"], inner_steps=10_000)
    sizes = {"count": 3, "layers": 3, "microbatches": 2, "plan": never, "plain": True}
    return StagedProblem(**{**sizes, "steps": steps, **changes})


class StageSwarm(Swarm):
    """Real nodes and trainers, each of a stage."""

    problem: StagedProblem  # type: ignore[assignment]  # has all that a Swarm asks of one

    def __init__(
        self, problem: StagedProblem, replicas: int | Mapping[int, int] = 0, *, at: int = 0
    ) -> None:
        """Args:
        replicas: of each stage, or by stage, that are started at once.
        at: the iteration that all of them have begun when the swarm is given."""
        if isinstance(replicas, int):
            replicas = dict.fromkeys(range(problem.count), replicas)
        names = [f"{stage}{'abcdef'[n]}" for stage, of in replicas.items() for n in range(of)]
        super().__init__(problem, names, delay_s=0.002)  # type: ignore[arg-type]  # likewise
        self._reached = at

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._reached:
            await self.reached(self._reached)
        return self

    def part(self, problem: Any, name: str, train: TrainSide) -> Held:
        config, stage = problem.config, stage_of(name)
        part, loop = part_of(problem.task, config, stage), self.loop
        assert isinstance(loop, VirtualLoop)
        replica = TimedStage(
            *(problem.task, part.module, config, problem.cursor(name), train.post),
            begins=stage == 0,
            clock=loop.time,
            forward_s=problem.forward_s.get(name, 0.01),
            computes=train.computes,
        )
        return Held(replica, problem.fragments(part), stage, problem.task.activation_shape)

    async def reached(self, iteration: int, limit_s: float = 60.0) -> None:
        """Until every peer that lives has begun that iteration."""
        await self.until(lambda: min(p.trainer.step for p in self.alive) >= iteration, limit_s)

    # ------------------------------------------------------------------------------- outcomes

    def of_stage(self, stage: int) -> list[Peer]:
        """All that have ever served it, gone or not."""
        return [peer for peer in self.peers.values() if stage_of(peer.name) == stage]

    def counted(self, stage: int, iteration: int) -> Counter[tuple[PeerProcess, int]]:
        """How often each microbatch is in the gradients of a stage's replicas, as (origin, n)."""
        found: Counter[tuple[PeerProcess, int]] = Counter()
        for peer in self.of_stage(stage):
            for told in peer.replica.iterations:
                if told.iteration == iteration:
                    found.update(self._named(peer, told.counted))
        return found

    async def ends_accounted(self) -> None:
        """Until all that live have ended; then `assert_accounted`."""
        await self.finished()
        self.assert_accounted()

    def assert_counted_once(self) -> None:
        """No microbatch is twice in the gradients of a stage, whatever has happened."""
        for stage in range(self.problem.count):
            for iteration in range(1, self.problem.steps + 1):
                twice = {m: n for m, n in self.counted(stage, iteration).items() if n > 1}
                assert not twice, (stage, iteration, twice)

    def assert_accounted(self) -> None:
        """Every microbatch of an origin that lives has come back or was said to be dropped, or was
        not begun, in an iteration that is said to be over; each stage has counted those that have
        come back, or it is said why not; and whoever had one straight from an origin that was
        killed amid the iteration has said so."""
        self.assert_counted_once()
        for origin in self.of_stage(0):
            if origin.killed:
                self._assert_orphans_told(origin)
            for told in origin.replica.iterations:
                dropped = {
                    event["microbatch"]
                    for event in origin.of_kind("dropped")
                    if event["iteration"] == told.iteration
                }
                done = set(told.counted)
                assert not done & dropped, (origin.name, told.iteration)
                late = told.iteration in {event["iteration"] for event in origin.of_kind("late")}
                begun = set() if late else set(range(self.problem.microbatches))
                assert done | dropped == begun, origin.name
                for stage in range(1, self.problem.count):
                    self._assert_explained(stage, told.iteration, origin, done)

    def _assert_explained(self, stage: int, iteration: int, origin: Peer, done: set[int]) -> None:
        process = process_of(origin)
        counted = {n for begun, n in self.counted(stage, iteration) if begun == process}
        where = (stage, iteration, process)
        assert counted <= done, where
        replicas = self.of_stage(stage)
        ended = [(p, t) for p in replicas for t in p.replica.iterations if t.iteration == iteration]
        left_out = any(told.discarded for _, told in ended)
        gone = all(p.killed and p.trainer.step < iteration for p in replicas)
        # A killed origin had no time to learn that a replica was gone; only that it was silent.
        words = ("lost", "unconfirmed") if origin.killed else ("lost",)
        died = {
            microbatch
            for word in words
            for event in origin.of_kind(word)
            if word == "lost" or event["replica"] not in {p.name for p, _ in ended}
            if event["iteration"] == iteration and event["replica"] in {p.name for p in replicas}
            for microbatch in numbers_in(event)
        }
        assert not died & counted, where
        for microbatch in done - counted - died if not (left_out or gone) else ():
            assert self.was_skipped(stage, iteration, process, microbatch), (*where, microbatch)

    def _assert_orphans_told(self, origin: Peer) -> None:
        iteration, process = origin.trainer.step, process_of(origin)
        told: Counter[int] = Counter()
        for peer in self.alive:
            for event in peer.of_kind("orphaned"):
                if event["start_ms"] != process.start_ms:
                    continue
                assert (event["iteration"], event["origin"]) == (iteration, process.peer)
                told.update(numbers_in(event))
                counted = self._named(peer, peer.replica.iterations[iteration - 1].counted)
                assert event["counted"] == sorted(n for begun, n in counted if begun == process)
        assert set(told.values()) <= {1}, "one peer has each straight from its origin"
        entered = {n for job, i, n in origin.replica.jobs if (job, i) == (JobKind.ENTER, iteration)}
        reached = {
            number
            for peer in self.alive
            for job, i, n in peer.replica.jobs
            if stage_of(peer.name) > 0 and (job, i) == (JobKind.FORWARD, iteration)
            for begun, number in self._named(peer, [n])
            if begun == process
        }
        assert reached <= told.keys() <= entered, (iteration, process, reached, told, entered)

    def was_skipped(self, stage: int, iteration: int, origin: PeerProcess, microbatch: int) -> bool:
        """Tells whether a peer told of the skip; no stage without a replica is planned with."""
        return any(
            (event["stage"], event["iteration"], event["microbatch"])
            == (stage, iteration, microbatch)
            and (event["origin"], event["start_ms"]) == (origin.peer, origin.start_ms)
            and event["instead"] is None
            for peer in self.peers.values()
            for event in peer.of_kind("rerouted")
        )

    def durations(self, name: str) -> list[float]:
        ends = [told.at_s for told in self[name].replica.iterations]
        return [after - before for before, after in pairwise(ends)]

    def assert_stages_agree(self) -> None:
        """All replicas of a stage that live hold the same anchors and momenta."""
        for stage in range(self.problem.count):
            alive = [peer for peer in self.of_stage(stage) if not peer.killed]
            assert len({(peer.versions, peer.outer_hash) for peer in alive}) == 1, stage

    def whole(self) -> dict[str, Tensor]:
        """The parameters of the first living replica of each stage."""
        found: dict[str, Tensor] = {}
        for stage in range(self.problem.count):
            alive = [peer for peer in self.of_stage(stage) if not peer.killed]
            found.update(alive[0].replica.parameters)
        return found

    def total(self, count: str) -> int:
        return sum(getattr(peer.node.stages.context.counts, count) for peer in self.peers.values())

    def _named(self, peer: Peer, numbers: Iterable[int]) -> Iterable[tuple[PeerProcess, int]]:
        if stage_of(peer.name) == 0:
            return [(process_of(peer), number) for number in numbers]
        known = {
            StageCallKey(0, process, n).number: (process, n)
            for process in map(process_of, self.of_stage(0))
            for n in range(self.problem.microbatches)
        }
        return [known[number] for number in numbers]


def process_of(peer: Peer) -> PeerProcess:
    assert peer.node.stages is not None
    return peer.node.stages.context.process


def numbers_in(event: Mapping[str, object]) -> list[int]:
    """The microbatches that an event tells of."""
    numbers = event["microbatches"]
    assert isinstance(numbers, list)
    return numbers


def stage_of(name: str) -> int:
    return int(name[0])
