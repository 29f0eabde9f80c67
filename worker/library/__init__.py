"""The library: a swarm around a training loop of one's own. `import murmuration` re-exports it.

swarm.py       Swarm, the context manager
arguments.py   arguments, and the config that the run and the loop agree on
hooks.py       the model and the optimizer of such a loop, as the outer loop sees them
site.py        several processes of torchrun as one peer
share.py       a share of the samples that no other peer has, leased in blocks (worker/leases/)
samples.py     samples with indices, in an order that is the same on every peer
steps.py       which steps of optimizers are one of the swarm's, and schedulers that follow the run
hf.py          a callback for transformers.Trainer; lightning.py: and one for Lightning's
"""
