"""Which samples each peer draws: blocks of a data set's order are leased, and no peer leads.

ledger.py         blocks, what is used of them, and what is told of them; two ledgers merge by union
lease_table.py    the rules: who holds which block
lease_service.py  carries out what they say
leased.py         the train thread's end: positions to draw, and those that are used
"""

from murmuration.worker.leases.lease_table import LeaseTable
from murmuration.worker.leases.leased import LeasedBlocks, Run
from murmuration.worker.leases.ledger import Ledger, SampleStream

__all__ = ["LeaseTable", "LeasedBlocks", "Ledger", "Run", "SampleStream"]
