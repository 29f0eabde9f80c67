"""Carries out rounds: what `murmuration.worker.rounds` decides, over the transport, in frames.

`contribute` takes this peer's own rounds to their reducers and back, `reduce` serves the shards
that this peer reduces; a contribution and its reduction share one stream. `pairs` holds rounds in
small groups, every two peers on one stream; `agreement` is the pass over all that ends a run of
them. All of it runs on the I/O thread; encoding, averaging and checking run in blocks in
`Context.offload`, so that the loop keeps its pace.
"""
