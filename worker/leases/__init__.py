"""Which samples each peer draws: blocks of a data set's order are leased, and no peer leads.

types.py    what the train thread, the machine and other peers tell each other
ledger.py   what is used of each stream; two ledgers merge by union
table.py    the state machine: who holds which block
io.py       carries out what it says
blocks.py   the train thread's end: positions to draw, and those that are used
"""

from murmuration.worker.leases.blocks import LeasedBlocks, Run
from murmuration.worker.leases.ledger import Ledger
from murmuration.worker.leases.table import LeaseTable
from murmuration.worker.leases.types import SampleStream

__all__ = ["LeaseTable", "LeasedBlocks", "Ledger", "Run", "SampleStream"]
