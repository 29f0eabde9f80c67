"""Runs of peers in pairs, each step of which takes half a second, and what has come of them."""

from collections.abc import Callable
from dataclasses import replace

from murmuration.algorithms.plan import PRESETS, Plan
from tests.protocol.pair_taps import GossipMessage
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm

NOLOCO = replace(PRESETS["noloco"], inner_steps=5, consensus=False)
SLOW = replace(NOLOCO, inner_steps=20)  # a period is longer than a death takes to be noticed


def steady(steps: int, plan: Plan = NOLOCO, seed: int = 0) -> Problem:
    step_s = dict.fromkeys("abcdefgh", 0.5)
    return Problem(layers=(300, 200), plan=plan, steps=steps, step_s=step_s, seed=seed)


def rounds_of(peer: Peer) -> list[object]:
    return [event["round"] for event in peer.of_kind("round")]


def failures_of(peer: Peer) -> list[object]:
    return [event["round"] for event in peer.of_kind("round_failed")]


def in_round(swarm: Swarm, round_: int, kind: str) -> Callable[[GossipMessage], bool]:
    """A message of that kind in everyone's round `round_`, which has begun at the speaker."""
    return lambda said: said.kind == kind and swarm[said.speaker].versions[0] == round_
