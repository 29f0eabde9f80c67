"""The daemon that each machine runs: a train thread, an I/O thread, and a mailbox between them.

A fragment's journey through the files: `train` takes inner steps and finds a fragment due;
`mailbox` hands it to the I/O thread, whose tasks `node` holds together; `exchange` carries out what
the state machines in `rounds` decide, over `transport`, in the words of `wire`; the reduction comes
back through the mailbox, and `train` applies it. `membership` says who is alive, `states` fetches
what a peer missed, `checkpoint` keeps it all; `daemon` starts and ends the whole.
"""
