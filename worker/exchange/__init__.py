"""Rounds: means without a leader (`allreduce`), and rounds in pairs and small groups (`pairwise`).

Rules are pure (`closing`, `round`, `view`), and conversations are coroutines over streams. All is
on the I/O thread, but for encoding, averaging and checking: they run in `Context.offload`.
"""
