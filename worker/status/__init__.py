"""What a peer says of itself to whoever watches it.

document.py  the answer to `murmur status`, and those of the other peers
rounds.py    what it says of rounds
exporter.py  the same numbers for Prometheus
figures.py   what the peer measures of its rounds, links and disk
results.py   what all peers have come to, brought together at the end of the run
locator.py   faults, found by comparing these with the other peers'
"""

from murmuration.worker.status.document import (
    LagMonitor,
    NodeMeasurements,
    ask_peers,
    status_document,
)
from murmuration.worker.status.exporter import MetricsServer
from murmuration.worker.status.figures import OwnFigures
from murmuration.worker.status.locator import FaultLocator
from murmuration.worker.status.results import ResultExchange
from murmuration.worker.status.rounds import RoundLog

__all__ = [
    "FaultLocator",
    "LagMonitor",
    "MetricsServer",
    "NodeMeasurements",
    "OwnFigures",
    "ResultExchange",
    "RoundLog",
    "ask_peers",
    "status_document",
]
