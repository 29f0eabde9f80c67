"""One stage's replicas by accumulated expected time."""

from collections import Counter

from algorithms.skippipe.routing import ReplicaQueue


def test_microbatches_follow_throughput() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 3.0})
    assert Counter(queue.choose() for _ in range(40)) == {1: 30, 2: 10}


def test_ties_go_to_the_lower_peer() -> None:
    queue = ReplicaQueue({5: 1.0, 2: 1.0, 9: 1.0})
    assert [queue.choose() for _ in range(6)] == [2, 5, 9, 2, 5, 9]
