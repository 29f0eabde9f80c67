"""Rounds of thousands of peers on a virtual clock: the code that runs live, all in one process.

Read in this order: `scenario` (what is asked for), `faults` (what goes wrong), `clock`, `pipe` and
`network`, `task`, `beliefs` and `swarm` (membership, and faults carried out), `loop` and `streams`
(on which the live coroutines run), `peer` (inner steps and the account of time), `allreduce` and
`means`, `pairs`, `run` (what comes out).
"""

from murmuration.worker.simulation.run import simulate
from murmuration.worker.simulation.scenario import Scenario
from murmuration.worker.simulation.task import Figures

__all__ = ["Figures", "Scenario", "simulate"]
