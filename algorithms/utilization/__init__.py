"""How much of the time a swarm computes on a given link, and which plan makes it enough.

workload.py    what a step costs and what a plan sends, as plain numbers
simulator.py   compute utilization over link speeds (the simulator of Streaming DiLoCo's paper)
prediction.py  a plan on a link: utilization, stall, bytes; the link that a plan needs
proposals.py   the plans that reach a target on a link, best first
"""

from algorithms.utilization.prediction import Prediction, needed_mbps, predict
from algorithms.utilization.proposals import MAX_INNER_STEPS, Proposal, Proposals, propose
from algorithms.utilization.simulator import utilization
from algorithms.utilization.workload import Rounds, Workload, rounds_of, workload_of

__all__ = [
    "MAX_INNER_STEPS",
    "Prediction",
    "Proposal",
    "Proposals",
    "Rounds",
    "Workload",
    "needed_mbps",
    "predict",
    "propose",
    "rounds_of",
    "utilization",
    "workload_of",
]
