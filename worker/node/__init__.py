"""The parts of a peer: its node and what it answers, its session, the thread they run on."""
