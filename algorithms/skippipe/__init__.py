"""SkipPipe: layers cut into stages, and a route through some of them for every microbatch.

The model and its peers
partition.py     which layers make up which stage, by parameters or measured cost, within memory
pipeline.py      links, what a hop and a visit cost, who serves which stage with how much memory
assignment.py    who serves which stage at the beginning; who joins or moves where

Routes
route.py         a route, what it may not do, and how two routes trade
draws.py         seeded draws, and how often stages and peers are visited
routing.py       the presets full, random, stochastic and skip, and what an iteration takes by each
simulator.py     one iteration, event by event, with deadlocks
gradients.py     the gradient of a stage: sum and visits

The search behind skip
search.py        its phases in order; A and B: equal coverage, bounded memory
planner.py       the best route of one microbatch alone
local_search.py  C: routes trade, and visits move to replicas with room
scores.py        the simulated time that decides, and the effort spent

Ref: arXiv:2502.19913.
"""
