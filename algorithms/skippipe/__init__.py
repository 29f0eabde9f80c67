"""SkipPipe: layers cut into stages, and a route through some of them for every microbatch.

partition.py    which layers make up which stage, by measured cost and memory
cost.py         what a hop and a visit cost
placement.py    which peer serves which stage; matching.py is its inner problem
pipeline.py     stages, memory and costs: what routes are planned on
route.py        a route, and what it may not do
coverage.py     how often stages and peers are visited by routes in flight together
simulator.py    one iteration, event by event, with deadlocks
prediction.py   one iteration by any routing: routes, timeline, bound
proposal.py     which peer should serve which stage
uplinks.py      the bound where a peer's messages share its line
routing.py      the presets full, random, stochastic (stochastic.py) and skip
search.py       the search behind skip, in phases: settle.py, untangle.py, localsearch.py
bound.py        what no routes can beat
gradients.py    the gradient of a stage: sum and visits

Ref: arXiv:2502.19913.
"""
