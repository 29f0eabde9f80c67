"""One stage of a model, served to the microbatches of any peer.

config.py    how a model is cut and routed: the section [stages]
replica.py   train: the stage's layers, computing what visits ask for
desk.py      io: hands computations to the train thread, and their results back
room.py      io: bytes in flight, bounded
calls.py     io: a visit asked of another peer
serving.py   io: visits that arrive here, and on to the next stage
origin.py    io: the microbatches that begin here
counting.py  when an iteration is over, and whether each visit counts once
profile.py   what was measured of links and stage, as it is gossiped
schedule.py  from gossiped profiles to routes, the same on every peer
"""

from worker.stages.config import StagesConfig

__all__ = ["StagesConfig"]
