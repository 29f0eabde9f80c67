"""Outer rounds as state machines without I/O: what to send to whom, and when a mean may close.

`contributing` follows this peer's own rounds, `reducing` the shards that this peer reduces for all,
`meeting` a round in a small group such as a pair, and `lead` how early a peer may come to it;
`repair` decides whose state to fetch when this peer's differs. `worker.exchange` carries them out.
"""

from worker.rounds.contributing import Contributing
from worker.rounds.lead import Lead
from worker.rounds.meeting import Meeting
from worker.rounds.reducing import Reducing
from worker.rounds.repair import Repair, choose_repair, step_of_the_others
from worker.rounds.types import RoundConfig, ShardKey, View

__all__ = [
    "Contributing",
    "Lead",
    "Meeting",
    "Reducing",
    "Repair",
    "RoundConfig",
    "ShardKey",
    "View",
    "choose_repair",
    "step_of_the_others",
]
