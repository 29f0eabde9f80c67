"""A model in stages learns what the whole model would, whatever way its microbatches take."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import StageModule
from tests.protocol.stage_swarm import (
    HELD_BYTES,
    StagedProblem,
    StageSwarm,
    incarnation_of,
    stage_of,
)
from tests.protocol.virtual_time import run
from tests.support.whole_training import Whole, distance, trained_whole

NO_TROUBLE = ("repeated", "rerouted", "skipped", "dropped", "lost", "discarded")


def reference(problem: StagedProblem, origins: Iterable[str]) -> Whole:
    """The whole model, trained on the microbatches of all origins, without stages."""
    cursors = [problem.cursor(origin) for origin in origins]
    return trained_whole(problem.task, problem.inner, cursors, problem.microbatches, problem.steps)


def first_gradients(swarm: StageSwarm) -> dict[str, Tensor]:
    """Of the whole model, in the first iteration, as one replica of each stage found them."""
    found: dict[str, Tensor] = {}
    for stage in range(swarm.problem.count):
        found.update(swarm.of_stage(stage)[0].replica.iterations[0].gradient)
    return found


def assert_no_trouble(swarm: StageSwarm) -> None:
    assert {name: swarm.total(name) for name in NO_TROUBLE} == dict.fromkeys(NO_TROUBLE, 0)


def assert_learned_as_one_process(swarm: StageSwarm) -> None:
    expected = reference(swarm.problem, [peer.name for peer in swarm.of_stage(0)])
    assert distance(swarm.whole(), expected.last) < 1e-5


def test_one_replica_a_stage_learns_what_a_single_process_does() -> None:
    async def scenario() -> None:
        async with StageSwarm(StagedProblem()) as swarm:
            await swarm.start_all()
            await swarm.finished()
            expected = reference(swarm.problem, ["0a"])
            assert distance(first_gradients(swarm), expected.first) < 1e-5
            assert distance(swarm.whole(), expected.last) < 1e-5
            assert_no_trouble(swarm)
            for iteration in range(1, swarm.problem.steps + 1):
                for stage in range(4):
                    begun = range(swarm.problem.microbatches)
                    every = {(incarnation_of(swarm["0a"]), n): 1 for n in begun}
                    assert swarm.counted(stage, iteration) == every

    run(scenario())


@pytest.mark.parametrize("cut", [(3, 1, 2), (1, 1, 4)])
def test_a_cut_that_the_run_says_learns_what_a_single_process_does(cut: tuple[int, ...]) -> None:
    async def scenario() -> None:
        problem = StagedProblem(count=3, cut=cut, layers=6, steps=3)
        async with StageSwarm(problem) as swarm:
            await swarm.start_all(2)
            await swarm.finished()
            assert_learned_as_one_process(swarm)
            assert_no_trouble(swarm)
            swarm.assert_counted_once()
            swarm.assert_stages_agree()
            for peer in swarm.alive:
                held = [
                    name for name in peer.replica.parameters if name.endswith("down_proj.weight")
                ]
                assert len(held) == cut[stage_of(peer.name)]

    run(scenario())


def test_the_loss_told_is_that_of_the_whole_model() -> None:
    problem = StagedProblem(steps=1)

    async def scenario() -> None:
        async with StageSwarm(problem) as swarm:
            await swarm.start_all()
            await swarm.finished()
            stream = problem.task.batches("train", problem.cursor("0a"))
            model = problem.task.model()
            losses = [
                problem.task.loss(model, next(stream)).item() for _ in range(problem.microbatches)
            ]
            assert swarm["0a"].replica.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    run(scenario())


@pytest.mark.parametrize("routing", ["full", "random"])
def test_two_replicas_a_stage_in_sync_learn_from_both_origins(routing: str) -> None:
    async def scenario() -> None:
        async with StageSwarm(StagedProblem(routing=routing, steps=3)) as swarm:
            await swarm.start_all(2)
            await swarm.finished()
            assert_learned_as_one_process(swarm)
            assert_no_trouble(swarm)
            swarm.assert_counted_once()
            swarm.assert_stages_agree()
            for peer in swarm.alive:  # an even share each, or the mean of means were another
                assert [len(told.counted) for told in peer.replica.iterations] == [4, 4, 4]

    run(scenario())


def test_uneven_shares_of_the_visits_count_as_what_they_are() -> None:
    async def scenario() -> None:
        async with StageSwarm(StagedProblem(steps=3)) as swarm:
            await swarm.start_all({0: 2, 1: 3, 2: 2, 3: 2})
            await swarm.finished()
            assert_learned_as_one_process(swarm)
            assert_no_trouble(swarm)
            shares = {
                len(told.counted) for peer in swarm.of_stage(1) for told in peer.replica.iterations
            }
            assert shares == {2, 3}  # eight visits in an iteration

    run(scenario())


def test_a_replica_that_nothing_visits_does_not_thin_the_mean() -> None:
    async def scenario() -> None:
        async with StageSwarm(StagedProblem(microbatches=2, steps=2)) as swarm:
            await swarm.start_all({0: 1, 1: 3, 2: 1, 3: 1})
            await swarm.finished()
            assert_learned_as_one_process(swarm)
            shares = {
                len(told.counted) for peer in swarm.of_stage(1) for told in peer.replica.iterations
            }
            assert shares == {0, 1}  # two visits in an iteration

    run(scenario())


# ------------------------------------------------------------------------------------- skipping


@pytest.mark.parametrize(("routing", "drawn"), [("random", 0), ("skip", 2)])
def test_skips_visit_the_stages_equally_often(routing: str, drawn: int) -> None:
    """But for what is left over while routes are drawn, until better ones are found."""
    problem = StagedProblem(routing=routing, skip=0.25, steps=6)

    async def scenario() -> None:
        async with StageSwarm(problem) as swarm:
            await swarm.start_all(1)
            await swarm.finished()
            assert_no_trouble(swarm)
            visits = [
                [sum(swarm.counted(stage, i).values()) for i in range(1, 7)] for stage in range(4)
            ]
            assert visits[0] == [4] * 6
            for stage in (1, 2, 3):  # 4 routes of 2 stages in an iteration, 3 stages
                assert set(visits[stage]) <= {2, 3}
            assert all(abs(sum(each) - 16) <= drawn for each in visits[1:])

    run(scenario())


def test_a_stages_gradient_is_the_mean_over_its_own_visits() -> None:
    problem = StagedProblem(routing="random", skip=0.25, steps=1)

    async def scenario() -> None:
        async with StageSwarm(problem) as swarm:
            await swarm.start_all()
            await swarm.finished()
            origin = incarnation_of(swarm["0a"])
            routes = {
                n: [stage for stage in range(4) if (origin, n) in swarm.counted(stage, 1)]
                for n in range(problem.microbatches)
            }
            assert {len(stages) for stages in routes.values()} == {3}
            expected = skipped_gradients(problem, routes)
            assert distance(first_gradients(swarm), expected) < 1e-5

    run(scenario())


def skipped_gradients(problem: StagedProblem, routes: dict[int, list[int]]) -> dict[str, Tensor]:
    """Of each stage, by plain autograd through the stages of each route."""
    modules = [part_of(problem.task, problem.config, stage).module for stage in range(4)]
    stream = problem.task.batches("train", problem.cursor("0a"))
    sums: defaultdict[str, Tensor | float] = defaultdict(float)
    visits: Counter[str] = Counter()
    for _, stages in sorted(routes.items()):
        batch = next(stream)
        first = modules[0]
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
    ("routing", "plan"),
    [("stochastic", "diloco"), ("skip", "streaming"), ("random", "noloco"), ("full", "streaming")],
)
def test_replicas_of_a_stage_end_with_one_anchor(routing: str, plan: str) -> None:
    problem = StagedProblem(
        routing=routing, plan=PLANS[plan], steps=8, layers=8, microbatches=2, activations="bf16"
    )

    async def scenario() -> None:
        async with StageSwarm(problem) as swarm:
            await swarm.start_all(2)
            await swarm.finished()
            assert_no_trouble(swarm)
            swarm.assert_stages_agree()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                assert min(peer.versions) >= 2
                assert {e["contributors"] for e in peer.of_kind("round")} == {2}

    run(scenario())


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("limits", [1, 2])
def test_little_room_defers_forwards_and_changes_nothing(limits: int) -> None:
    """Backwards and losses always go through, or the first deferred forward were the last."""
    problem = StagedProblem(limits=limits, microbatches=6, steps=3)

    async def scenario() -> None:
        async with StageSwarm(problem) as swarm:
            await swarm.start_all()
            await swarm.finished()
            assert_learned_as_one_process(swarm)
            assert_no_trouble(swarm)
            budgets = {peer.name: peer.node.stages.context.budget for peer in swarm.alive}
            assert budgets["0a"].peak_bytes == limits * HELD_BYTES  # six want in at once
            for budget in budgets.values():
                assert 0 < budget.peak_bytes <= limits * HELD_BYTES
                assert budget.held_bytes == 0

    run(scenario())


def test_one_stage_with_little_room_holds_the_others_back_only() -> None:
    """Two origins send to one replica of stage 1, which takes one call at a time."""
    problem = StagedProblem(count=3, layers=3, limits=1, microbatches=3, steps=3)

    async def scenario() -> None:
        async with StageSwarm(problem) as swarm:
            await swarm.start_all({0: 2, 1: 1, 2: 1})
            await swarm.finished()
            assert_no_trouble(swarm)
            assert_learned_as_one_process(swarm)
            assert swarm["1a"].node.stages.context.budget.peak_bytes == HELD_BYTES  # of two

    run(scenario())
