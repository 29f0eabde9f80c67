"""One stage of a model, served to the microbatches of any peer: what happens, in order.

A microbatch *visits* the stages of its route: that is the word of SkipPipe's mathematics, and what
gradients are divided by. A *stage call* is the request that brings it to a stage.

Before the training
stages_config.py  how a model is cut and routed: the section [stages]
rebalancing.py    which stage a newcomer serves; later, which peer moves to another
part.py           all of the model, or one stage; when stages are rebuilt or assembled, and how

On the train thread
stage_replica.py  the iterations of a stage, and its layers, which do the jobs of stage calls

On the I/O thread
stage_node.py     all of the following put together; the microbatches that begin here
context.py        what they share: peers, counts, memory, the way to the train thread
profile.py        what is measured of links and stage, when, and what gossip carries of it
planner.py        from all profiles to this peer's routes
stage_call.py     a call's key, its route, its reply, and all of it on the wire
forwarder.py      a call of the next stage; of another replica, or past a stage
server.py         calls and reports that arrive here
barrier.py        when an iteration is over, and whether its gradient can be vouched for
"""
