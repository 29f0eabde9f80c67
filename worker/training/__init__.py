"""The train thread: inner steps, outer rounds, checkpoints, evaluation."""
