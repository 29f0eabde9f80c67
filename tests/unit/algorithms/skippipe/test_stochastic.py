"""One stage's replicas by accumulated expected time."""

from collections import Counter

from algorithms.skippipe.stochastic import ReplicaQueue


def chosen(queue: ReplicaQueue, times: int, now_s: float = 0.0) -> Counter[int | None]:
    return Counter(queue.choose(now_s) for _ in range(times))


def test_microbatches_follow_throughput() -> None:
    assert chosen(ReplicaQueue({1: 1.0, 2: 3.0}), 40) == {1: 30, 2: 10}


def test_measurements_move_the_choice() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 1.0})
    for _ in range(60):
        queue.measured(2, 3.0)
    counts = chosen(queue, 40)
    assert 29 <= counts[1] <= 31


def test_a_replica_that_failed_is_passed_over_for_a_while() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 1.0}, ban_s=10.0)
    queue.failed(1, now_s=5.0)
    assert chosen(queue, 5, now_s=14.9) == {2: 5}
    assert queue.choose(now_s=15.0) == 1
    queue.failed(1, now_s=20.0)
    queue.failed(2, now_s=20.0)
    assert queue.choose(now_s=21.0) is None


def test_a_new_replica_begins_at_the_minimum() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 1.0})
    chosen(queue, 20)
    queue.joined(3, 1.0)
    queue.joined(3, 1.0)
    assert chosen(queue, 30) == {1: 10, 2: 10, 3: 10}


def test_a_replica_that_left_is_not_chosen() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 1.0})
    queue.left(1)
    queue.measured(1, 9.0)
    assert chosen(queue, 4) == {2: 4}
    queue.left(2)
    assert queue.choose(0.0) is None
