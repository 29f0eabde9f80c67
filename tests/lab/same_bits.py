"""The bits that small fixed runs end with: anchors and outer momenta of every peer, hashed.

    python -m tests.lab same-bits

Real nodes and trainers on the virtual clock, so that a run takes the same course every time. A
change that means to keep the mathematics keeps every line; compare the output of two commits. The
run's id is fixed, since a new wire format would draw other pairs. Routes are drawn, not searched.
"""

from dataclasses import replace
from unittest.mock import PropertyMock, patch

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.manifest import Manifest
from tests.protocol.problem import Problem
from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

RUN = 0x5EED
LAYERS = (411, 197, 350, 128)
DELAY_S = 0.0137  # no message comes just as a step ends: its anchor might count before or after it
NOLOCO = replace(PRESETS["noloco"], inner_steps=4)
STREAMING = {"inner_steps": 8, "fragments": 3, "overlap_steps": 2}
PLANS: dict[str, Plan] = {
    "diloco": replace(PRESETS["diloco"], inner_steps=4),
    "streaming (e3m0)": replace(PRESETS["streaming"], **STREAMING),
    "onebit": replace(PRESETS["onebit"], **STREAMING),
    "sparse": replace(PRESETS["sparse"], **STREAMING),
    "co2": replace(PRESETS["co2"], inner_steps=4, overlap_steps=4),
    "noloco": NOLOCO,
    "noloco, the paper's update": replace(
        NOLOCO, shared_momentum=False, outer_momentum=0.5, outer_lr=0.7, outer_pull=0.7
    ),
    "streaming-noloco": replace(PRESETS["streaming-noloco"], **STREAMING),
    "ddp": PRESETS["ddp"],
}
STAGED = {
    "4 stages x 2, full": StagedProblem(steps=6),
    "4 stages x 2, skip 0.25": StagedProblem(routing="random", skip=0.25, steps=6),
    "4 stages x 2, full, diloco": StagedProblem(
        steps=6, plan=replace(PRESETS["diloco"], inner_steps=2)
    ),
}


def main() -> int:
    with patch.object(Manifest, "run", PropertyMock(return_value=RUN)):
        for name, plan in PLANS.items():
            run(_flat(name, Problem(layers=LAYERS, plan=plan, steps=48)))
        for name, problem in STAGED.items():
            run(_staged(name, problem))
    return 0


async def _flat(name: str, problem: Problem) -> None:
    async with Swarm(problem, "abcd", delay_s=DELAY_S) as swarm:
        await swarm.finished()
        _tell(name, swarm)


async def _staged(name: str, problem: StagedProblem) -> None:
    async with StageSwarm(problem, 2) as swarm:
        await swarm.finished()
        _tell(name, swarm)


def _tell(name: str, swarm: Swarm) -> None:
    for peer in swarm.alive:
        versions = "/".join(map(str, peer.versions))
        print(f"{name:<28} {peer.name:<3} {versions:<12} {peer.outer_hash}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
