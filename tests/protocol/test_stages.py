"""A model in stages learns what the whole model would, whatever way its microbatches take."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.plan import PRESETS
from murmuration.algorithms.skippipe.search import search_routes
from murmuration.worker.pipeline import planner
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Cursor, StageModule
from murmuration.worker.training.replica import InnerReplica
from tests.protocol.stage_swarm import HELD_BYTES, StagedProblem, StageSwarm, process_of


@dataclass(frozen=True)
class Whole:
    """The run in one process: the gradients of the first iteration, and all parameters."""

    first: Mapping[str, Tensor]
    last: Mapping[str, Tensor]


def reference(problem: StagedProblem, origins: Iterable[str]) -> Whole:
    """The whole model, trained without stages on the microbatches of all origins: an AdamW step by
    their mean."""
    task, steps = problem.task, problem.steps
    model = task.model()
    replica = InnerReplica(task, model, problem.inner, Cursor(seed=0, stream="unused"), steps)
    streams = [task.batches("train", problem.cursor(origin)) for origin in origins]
    first: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        batches = [next(stream) for stream in streams for _ in range(problem.microbatches)]
        model.zero_grad()
        (sum(task.loss(model, batch) for batch in batches) / len(batches)).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        first = first or gradients
        replica.inner_step(step, {name: value.clone() for name, value in gradients.items()})
    return Whole(first, {n: p.detach().clone() for n, p in model.named_parameters()})


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    distances = [
        float((found[name] - value).norm() / max(float(value.norm()), 1e-12))
        for name, value in expected.items()
    ]
    assert not any(map(math.isnan, distances))
    return max(distances)


NO_TROUBLE = ("repeated", "rerouted", "skipped", "dropped", "lost", "discarded")


def first_gradients(swarm: StageSwarm) -> dict[str, Tensor]:
    """The model's gradients in the first iteration, as one replica of each stage found them."""
    found: dict[str, Tensor] = {}
    for stage in range(swarm.problem.count):
        found.update(swarm.of_stage(stage)[0].replica.iterations[0].gradient)
    return found


def assert_no_trouble(swarm: StageSwarm) -> None:
    assert {name: swarm.total(name) for name in NO_TROUBLE} == dict.fromkeys(NO_TROUBLE, 0)


async def ends_as_one_process(swarm: StageSwarm) -> None:
    """It has learned what one process would."""
    await swarm.finished()
    assert_no_trouble(swarm)
    expected = reference(swarm.problem, [peer.name for peer in swarm.of_stage(0)])
    assert distance(swarm.whole(), expected.last) < 1e-5


async def test_one_replica_a_stage_learns_what_a_single_process_does():
    async with StageSwarm(StagedProblem(), 1) as swarm:
        await swarm.finished()
        expected = reference(swarm.problem, ["0a"])
        assert distance(first_gradients(swarm), expected.first) < 1e-5
        assert distance(swarm.whole(), expected.last) < 1e-5
        assert_no_trouble(swarm)
        for iteration in range(1, swarm.problem.steps + 1):
            for stage in range(4):
                begun = range(swarm.problem.microbatches)
                every = {(process_of(swarm["0a"]), n): 1 for n in begun}
                assert swarm.counted(stage, iteration) == every


async def test_a_cut_of_the_run_learns_what_a_single_process_does():
    cut = (3, 1, 2)
    problem = StagedProblem(count=3, cut=cut, layers=6, steps=3)
    async with StageSwarm(problem, 2) as swarm:
        await ends_as_one_process(swarm)
        swarm.assert_counted_once()
        swarm.assert_stages_agree()
        for peer in swarm.alive:
            held = [name for name in peer.replica.parameters if name.endswith("down_proj.weight")]
            assert len(held) == cut[int(peer.name[0])]


async def test_the_loss_told_is_that_of_the_whole_model():
    problem = StagedProblem(steps=1)
    async with StageSwarm(problem, 1) as swarm:
        await swarm.finished()
        stream, model = problem.task.batches("train", problem.cursor("0a")), problem.task.model()
        batches = [next(stream) for _ in range(problem.microbatches)]
        losses = [problem.task.loss(model, batch).item() for batch in batches]
        assert swarm["0a"].replica.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("routing", ["full", "random"])
async def test_two_replicas_a_stage_in_sync_learn_from_both_origins(routing):
    async with StageSwarm(StagedProblem(routing=routing, steps=3), 2) as swarm:
        await ends_as_one_process(swarm)
        swarm.assert_counted_once()
        swarm.assert_stages_agree()
        for peer in swarm.alive:  # an even share each, or the mean of means were another
            assert [len(told.counted) for told in peer.replica.iterations] == [4, 4, 4]


@pytest.mark.parametrize(
    ("microbatches", "replicas", "shares"),
    [(4, {0: 2, 1: 3, 2: 2, 3: 2}, {2, 3}), (2, {0: 1, 1: 3, 2: 1, 3: 1}, {0, 1})],
    ids=["eight visits", "two visits"],
)
async def test_uneven_shares_of_the_visits_count_as_what_they_are(microbatches, replicas, shares):
    """A replica that nothing visits does not thin the mean."""
    async with StageSwarm(StagedProblem(microbatches=microbatches, steps=2), replicas) as swarm:
        await ends_as_one_process(swarm)
        told = [told for peer in swarm.of_stage(1) for told in peer.replica.iterations]
        assert {len(each.counted) for each in told} == shares


@pytest.mark.parametrize(("routing", "drawn"), [("random", 0), ("skip", 2)])
async def test_skips_visit_the_stages_equally_often(routing, drawn, monkeypatch):
    """But for what is left over while routes are drawn, until better ones are found."""
    monkeypatch.setattr(planner, "search_routes", partial(search_routes, effort_s=0.1))
    problem = StagedProblem(routing=routing, skip=0.25, steps=6, plain=True)
    async with StageSwarm(problem, 1) as swarm:
        await swarm.finished()
        assert_no_trouble(swarm)
        visits = [
            [sum(swarm.counted(stage, i).values()) for i in range(1, 7)] for stage in range(4)
        ]
        assert visits[0] == [4] * 6
        for stage in (1, 2, 3):  # 4 routes of 2 stages in an iteration, 3 stages
            assert set(visits[stage]) <= {2, 3}
        assert all(abs(sum(each) - 16) <= drawn for each in visits[1:])


async def test_a_stages_gradient_is_the_mean_over_its_own_visits():
    problem = StagedProblem(routing="random", skip=0.25, steps=1)
    async with StageSwarm(problem, 1) as swarm:
        await swarm.finished()
        origin = process_of(swarm["0a"])
        routes = {
            n: [stage for stage in range(4) if (origin, n) in swarm.counted(stage, 1)]
            for n in range(problem.microbatches)
        }
        assert {len(stages) for stages in routes.values()} == {3}
        assert distance(first_gradients(swarm), skipped_gradients(problem, routes)) < 1e-5


def skipped_gradients(problem: StagedProblem, routes: dict[int, list[int]]) -> dict[str, Tensor]:
    """The gradients of each stage, by plain autograd through the stages of each route."""
    modules = [part_of(problem.task, problem.config, stage).module for stage in range(4)]
    stream = problem.task.batches("train", problem.cursor("0a"))
    sums: defaultdict[str, Tensor | float] = defaultdict(float)
    visits: Counter[str] = Counter()
    for _, stages in sorted(routes.items()):
        batch, first = next(stream), modules[0]
        assert isinstance(first, StageModule)
        hidden = first.embed(batch)
        for stage in stages:
            hidden = modules[stage](hidden)
        named = {n: p for stage in stages for n, p in modules[stage].named_parameters()}
        gradients = torch.autograd.grad(first.loss(hidden, batch), list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            sums[name] = sums[name] + gradient
            visits[name] += 1
    return {name: total / visits[name] for name, total in sums.items()}


# ------------------------------------------------------------------------- rounds within a stage

PLANS = {
    "diloco": replace(PRESETS["diloco"], inner_steps=2),
    "streaming": replace(PRESETS["streaming"], inner_steps=4, fragments=0, overlap_steps=1),
    "noloco": replace(PRESETS["noloco"], inner_steps=2),
}


@pytest.mark.parametrize(
    ("routing", "plan"), [("stochastic", "diloco"), ("random", "noloco"), ("full", "streaming")]
)
async def test_replicas_of_a_stage_end_with_one_anchor(routing, plan):
    sizes = {"steps": 8, "layers": 8, "microbatches": 2, "activations": "bf16", "plain": True}
    problem = StagedProblem(routing=routing, plan=PLANS[plan], **sizes)
    async with StageSwarm(problem, 2) as swarm:
        await swarm.finished()
        assert_no_trouble(swarm)
        swarm.assert_stages_agree()
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            assert min(peer.versions) >= 2
            assert {e["contributors"] for e in peer.of_kind("round")} == {2}


async def test_little_room_defers_forwards_and_changes_nothing():
    """Backwards and losses always go through, or the first deferred forward were the last."""
    problem = StagedProblem(limits=1, microbatches=6, steps=3)
    async with StageSwarm(problem, 1) as swarm:
        await ends_as_one_process(swarm)
        budgets = {peer.name: peer.node.stages.context.budget for peer in swarm.alive}
        assert budgets["0a"].peak_bytes == HELD_BYTES  # six want in at once
        for budget in budgets.values():
            assert 0 < budget.peak_bytes <= HELD_BYTES
            assert budget.held_bytes == 0


async def test_one_stage_with_little_room_holds_the_others_back_only():
    """Two origins send to one replica of stage 1, which takes one call at a time."""
    problem = StagedProblem(count=3, layers=3, limits=1, microbatches=3, steps=3)
    async with StageSwarm(problem, {0: 2, 1: 1, 2: 1}) as swarm:
        await ends_as_one_process(swarm)
        assert swarm["1a"].node.stages.context.budget.peak_bytes == HELD_BYTES  # of two
