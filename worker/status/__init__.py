"""The words of a peer about itself to those that watch it.

document.py  the answer to `murmur status`, and those of the other peers
exporter.py  the same numbers for Prometheus; a caller that serves them imports it itself
results.py   what all peers have come to, brought together at the end of the run
locator.py   what the peer measures of its rounds, links and disk, and faults: these compared with
             the other peers'
"""
