"""The mathematics and the decisions of Murmuration: no I/O, clock, threads or global RNG.

What a run does      plan, fragments, schedule
One outer round      diloco (means over all), noloco (small groups), fragment_state (what is kept),
                     codecs (how values travel), robust (norms), counted (weights by work)
Which peers          draws (small groups, and who reduces which shard)
Model in stages      skippipe
Before a run         link, utilization, diagnosis, proposals: how fast it is, and which plan fits

Signs: a pseudo-gradient is always `anchor - local`, so that the outer step descends.
"""
