"""A peer that lacks state gets it: bootstrap, state transfer, repair."""
