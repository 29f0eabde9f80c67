"""Who a peer is, and what that lets it ask for.

admission.py  how a worker comes to its certificate
expulsions.py which certificates count no more
gate.py       what a caller may ask of a node by its own, and how it gets one
renewal.py    whom it asks for a later certificate (`murmuration.protos.identity.Renewal`)
words.py      what a peer says of itself, signed
"""

from murmuration.worker.identity.admission import Admission, Credentials, check_free
from murmuration.worker.identity.expulsions import Expulsions
from murmuration.worker.identity.gate import Gate
from murmuration.worker.identity.renewal import KeyHolders
from murmuration.worker.identity.words import SignedWords

__all__ = [
    "Admission",
    "Credentials",
    "Expulsions",
    "Gate",
    "KeyHolders",
    "SignedWords",
    "check_free",
]
