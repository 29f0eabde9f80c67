"""What a peer says of itself to whoever watches it.

document.py  the answer to `murmur status`
exporter.py  the same numbers for Prometheus
"""

from worker.status.document import LagMonitor, NodeMeasurements, RoundTotals, status_document
from worker.status.exporter import MetricsServer

__all__ = ["LagMonitor", "MetricsServer", "NodeMeasurements", "RoundTotals", "status_document"]
