"""The parts of a peer: its node and what it answers, how it is let in, what watches it."""
