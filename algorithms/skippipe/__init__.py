"""SkipPipe: layers cut into stages, and a route through some of them for every microbatch.

pipeline.py      what a hop and a visit cost, who serves which stage, which layers it has
route.py         a route, its rules, and equal coverage by seed
simulator.py     one iteration, event by event
search.py        full, random, stochastic, skip; its phases A and B: equal coverage, bounded memory
local_search.py  C: routes trade, and visits move to replicas with room

Ref: arXiv:2502.19913.
"""
