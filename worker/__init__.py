"""The daemon that each machine runs: a train thread, an I/O thread, and a mailbox between them.

A fragment's journey through the files: `training/loop` takes inner steps, and `training/outer`
finds a fragment due; `training/mailbox` hands it to the I/O thread, whose parts `node` holds
together; `exchange` decides about rounds and carries them out over `transport`, in the words of
`wire`; the reduction comes back through the mailbox, and `training/outer` applies it. `membership`
says who is alive, `node` and `identity` what a caller is answered, `catchup` fetches what a peer
has missed, `training/checkpoint` keeps it all; `daemon` starts and ends the whole.
"""
