"""The train thread: inner steps, outer rounds, checkpoints, evaluation, the mailbox to the node."""
