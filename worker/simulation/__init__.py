"""Rounds of thousands of peers on a virtual clock: the state machines that run live, all in one
process.

Read in this order: `scenario` (what is asked for), `faults` (what goes wrong), `clock`, `pipe` and
`network`, `task`, `beliefs` and `swarm` (membership, and faults carried out), `peer` (inner steps
and the account of time), `pairs`, `means` and `allreduce` (which carry out what the machines of
`worker.exchange` say), `run` (what comes out).
"""

from worker.simulation.run import simulate
from worker.simulation.scenario import Scenario
from worker.simulation.task import Figures

__all__ = ["Figures", "Scenario", "simulate"]
