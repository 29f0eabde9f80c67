"""The mathematics and the decisions of Murmuration: no I/O, clock, threads or global RNG.

Read in this order: `plan` (what a run does), `fragments`, `schedule`, `pseudogradient`, `codecs`,
`rendezvous`, `mean`, `outer`, `merge`; `reference` puts them together, all peers in one process.
Signs: a pseudo-gradient is always `anchor - local`, so that the outer step descends.
"""
