"""One stage of a model, served to the microbatches of any peer.

What a process holds
config.py      how a model is cut and routed: the section [stages]
cut.py         which layers a stage has
part.py        all of the model, or one stage
life.py        before the training and after it: whole weights in, the whole model out
newcomer.py    which stage a newcomer serves
rebuild.py     a stage made anew from its neighbours
assembly.py    the whole model from live peers or checkpoints

On the train thread
iterations.py  the loop: visits are computed until all have come back
replica.py     the stage's layers, computing what visits ask for

On the I/O thread
node.py        all of the following put together
context.py     what they share
probing.py     which link is measured next
profile.py     what was measured of links and stage, as it is gossiped
table.py       from gossiped profiles to what routes are planned on, the same on every peer
schedule.py    this peer's routes
visit.py       a visit's name, its route, and what comes back
origin.py      the microbatches that begin here
onward.py      a visit sent on; to another replica, or past a stage
calls.py       a visit asked of another peer
serving.py     visits that arrive here
errors.py      how they end without a gradient
room.py        bytes in flight, bounded
desk.py        hands computations to the train thread, and their results back
counting.py    when an iteration is over, and whether each visit counts once
moving.py      when a peer leaves its stage for another
placing.py     who that is, by the links that were measured
unserved.py    stages that nobody serves any more
"""
