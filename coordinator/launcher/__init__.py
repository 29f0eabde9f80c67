"""A swarm of worker processes on this machine."""
