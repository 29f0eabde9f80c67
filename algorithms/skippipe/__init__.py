"""SkipPipe: layers cut into stages, and a route through some of them for every microbatch.

The model and its peers
partition.py    which layers make up which stage, by parameters or measured cost, within memory
cost.py         what a hop and a visit cost
placement.py    a genetic search for who serves which stage; matching.py is its inner problem
proposal.py     its answer, turned to where an iteration is fastest
moving.py       which stage a newcomer should serve, who moves, and where
pipeline.py     stages, memory and costs: what routes are planned on

Routes
route.py        a route, and what it may not do
coverage.py     how often stages and peers are visited by routes in flight together
draws.py        seeded choices, the same everywhere
routing.py      the presets full, random, stochastic (stochastic.py) and skip

The search behind skip
search.py       its phases in order
planner.py      the best route of one microbatch alone
settle.py       A and B: equal coverage, bounded memory
untangle.py     C: collisions, as timetable.py finds them
localsearch.py  D: pairs of routes exchange what trades.py allows
scores.py       the simulated time that decides
journal.py      effort spent, candidates rejected

What comes of it
simulator.py    one iteration, event by event, with deadlocks
prediction.py   one iteration by any routing: routes, timeline, bound
bound.py        what no routes can beat; uplinks.py where a peer's messages share its line
gradients.py    the gradient of a stage: sum and visits

Ref: arXiv:2502.19913.
"""
