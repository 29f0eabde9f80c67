"""Rounds: means without a leader (`allreduce`), and rounds in pairs and small groups (`pairwise`).

Rules are pure: when a shard closes (`closing`), the staged commit (`round`), the view.
Conversations are coroutines, each over a stream of messages. All of it runs on the I/O thread;
encoding, averaging and checking run in blocks in `Context.offload`, so the loop keeps its pace.
"""
