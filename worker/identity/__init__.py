"""Who a peer is, and what that lets it ask for.

admission.py  how a worker comes to its certificate
gate.py       what a caller may ask of a node by its own, and how it gets one
"""

from worker.identity.admission import Admission, authority_of, enrol
from worker.identity.gate import Gate

__all__ = ["Admission", "Gate", "authority_of", "enrol"]
