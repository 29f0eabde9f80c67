"""Rounds of thousands of peers on a virtual clock: the code that runs live, all in one process. In
order: `scenario` (what is asked for, and what goes wrong), `virtual_loop` and `streams` (on which
the live coroutines run), `network`, `simulated_swarm` (membership and faults), `peer` (what it
learns, and the account of time), `means`, `pairs`, `run` (what comes out)."""

from murmuration.worker.simulation.run import Figures, simulate
from murmuration.worker.simulation.scenario import Scenario

__all__ = ["Figures", "Scenario", "simulate"]
