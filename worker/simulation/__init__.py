"""Rounds of thousands of peers on a virtual clock: the state machines that run live, all in one
process.

Read in this order: `scenario` (what is asked for), `clock`, `network`, `task`, `swarm` (membership
and faults), `peer` (inner steps and the account of time), `pairs`, `means` and `reducer` (a
peer's rounds, around `worker.rounds`), `run` and `figures` (what comes out).
"""

from worker.simulation.run import simulate
from worker.simulation.scenario import Scenario
from worker.simulation.task import Figures

__all__ = ["Figures", "Scenario", "simulate"]
