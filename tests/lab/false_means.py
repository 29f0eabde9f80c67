"""One reducer of four or eight lies about its means: when it is named, and what it costs.

    python -m tests.lab false-means [--peers 4 8] [--rounds 400] [--seeds 20]
    python -m tests.lab false-means --preset onebit --lies turned zero
    python -m tests.lab false-means --rounds 0   # what checks cost alone

Live nodes on the virtual clock, each pulled towards a point near a common one. A Markdown row has
after how many rounds all honest peers have named a liar, and the loss beside a run without it. A
last table has what checks add to an honest run of presets: bytes, time of a core, and its share.
"""

import argparse
import re
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.algorithms.robust import AGGREGATIONS
from murmuration.worker import wire
from murmuration.worker.cli.plan_report import run_workload
from murmuration.worker.config import load_config
from murmuration.worker.exchange.allreduce.checks import Checks
from murmuration.worker.exchange.round_context import RoundConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import NearSwarm, Peer
from tests.protocol.virtual_time import run
from tests.support.false_means import attacks

LIAR = "d"
MOST_ROUNDS = 200
LAYERS = 4
COSTS = ("diloco", "streaming", "onebit", "sparse")
INNER_STEPS = 3


def main() -> int:
    """Prints the tables; 1 if a liar was not named, or an honest peer was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--values", type=int, default=20_000)
    parser.add_argument("--preset", default="diloco", help="in short rounds of one fragment")
    parser.add_argument("--lies", nargs="+", choices=attacks(LIAR), default=[*attacks(LIAR)])
    parser.add_argument("--aggregation", choices=AGGREGATIONS, default="mean")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = replace(PRESETS[options.preset], inner_steps=INNER_STEPS, fragments=1, overlap_steps=0)
    rounds, steps = RoundConfig(aggregation=options.aggregation), INNER_STEPS * options.rounds
    problem = Problem(layers=(options.values,), steps=steps, plan=plan, rounds=rounds)
    print(
        "| peers | the liar answers | named after rounds, p50 | p99 | loss beside one without it |"
    )
    print("| ---: | --- | ---: | ---: | ---: |")
    wrong = False
    for peers in options.peers if options.rounds else ():
        names = "".join(names_of(peers).split(LIAR))
        without = loss_after(problem, names, nullcontext())
        change = 100 * (loss_after(problem, names_of(peers), nullcontext()) / without - 1)
        print(f"| {peers} | the mean | - | - | {change:+.1f} % |", flush=True)
        for name in options.lies:
            attack = attacks(LIAR)[name]
            problems = (replace(problem, seed=seed) for seed in range(options.seeds))
            after = [named_after(each, peers, attack()) for each in problems]
            p50, p99 = np.percentile(after, [50, 99], method="higher")
            loss = loss_after(problem, names_of(peers), attack())
            change = 100 * (loss / without - 1)
            print(f"| {peers} | {name} | {p50:.0f} | {p99:.0f} | {change:+.1f} % |", flush=True)
            wrong |= p99 > MOST_ROUNDS or change > 2
    print("\n| preset | values | peers | bytes of checks | ms of a core a round | of step time |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for preset in COSTS:
        for peers in options.peers:
            print(cost(preset, peers), flush=True)
    return int(wrong)


def names_of(peers: int) -> str:
    return "abcdefghijklmnop"[:peers]


def rounds_at_naming(peer: Peer) -> int | None:
    """How many rounds had been when this peer named the liar. Raises AssertionError: another."""
    texts = [str(event["text"]) for event in peer.of_kind("warning")]
    lies = [text for text in texts if "gave a false mean" in text or "pointed against" in text]
    assert all(text.startswith(f"{LIAR} ") for text in lies), lies
    found = [re.search(r"round (\d+) ", text) for text in lies]
    return min((int(each[1]) + 1 for each in found if each), default=None)


def named_after(problem: Problem, peers: int, attack: AbstractContextManager[None]) -> int:
    async def scenario() -> int:
        async with NearSwarm(replace(problem, steps=MOST_ROUNDS * INNER_STEPS)) as swarm:
            await swarm.start(*names_of(peers))
            honest = [swarm[name] for name in names_of(peers) if name != LIAR]
            with attack:
                await swarm.until(
                    lambda: all(
                        rounds_at_naming(peer) or peer.versions >= (MOST_ROUNDS,) for peer in honest
                    ),
                    10.0 * MOST_ROUNDS,
                )
            return max(rounds_at_naming(peer) or MOST_ROUNDS + 1 for peer in honest)

    return run(scenario())


def loss_after(problem: Problem, names: str, attack: AbstractContextManager[None]) -> float:
    """The loss of the honest peers' anchor, at their own points."""

    async def scenario() -> float:
        async with NearSwarm(problem) as swarm:
            await swarm.start(*names)
            honest = [swarm[name] for name in names if name != LIAR]
            with attack:
                await swarm.until(lambda: all(peer.done for peer in honest), 10.0 * problem.steps)
            (anchor,) = (each.anchor for each in honest[0].trainer.states)
            targets = [peer.replica._targets["layers.0.w"] for peer in honest]
            return float(sum(torch.dist(anchor, each) ** 2 for each in targets)) / len(targets)

    return run(scenario())


def cost(preset: str, peers: int) -> str:
    """A row: what checks take of an honest run at the preset's defaults."""
    workload = run_workload(load_config(None, [f"diloco.preset={preset}"]), None, threads=1)
    plan, values = PRESETS[preset], sum(workload.layers) + workload.outside
    problem = Problem(layers=(values // LAYERS,) * LAYERS, plan=plan, steps=5 * plan.inner_steps)
    spent = 0.0
    timed = [(wire.Commitment, "__init__"), (Checks, "_is_false"), (Checks, "_draw")]

    def timing(of: type, name: str) -> AbstractContextManager[object]:
        method = getattr(of, name)

        def work(*given: object) -> object:
            nonlocal spent
            began = time.thread_time()
            try:
                return method(*given)
            finally:
                spent += time.thread_time() - began

        return patch.object(of, name, work)

    async def sent_bytes() -> int:
        async with NearSwarm(problem) as swarm:
            await swarm.start(*names_of(peers))
            await swarm.finished(10.0 * problem.steps)
            traffic = (peer.transport.traffic for peer in swarm.alive)
            return sum(each.sent["Data/Exchange"] for each in traffic)

    with patch.object(Plan, "compares_norms", False):
        before = run(sent_bytes())
    with ExitStack() as timings:
        for each in timed:
            timings.enter_context(timing(*each))
        more, each_s = run(sent_bytes()) / before - 1, spent / peers
    ms, share = 1000 * each_s / 5, each_s / (problem.steps * workload.step_s)
    return f"| {preset} | {values:,} | {peers} | {more:.2%} | {ms:.1f} | {share:.2%} |"


if __name__ == "__main__":
    raise SystemExit(main())
