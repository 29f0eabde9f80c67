"""A reduction takes up what earlier ones of its range left out, once, whatever is redone."""

import torch
from torch import Tensor

from murmuration.worker.exchange.allreduce.mean import Left, Residuals
from murmuration.worker.exchange.view import ShardKey


def key(round_: int, fragment: int = 0, shard: int = 0) -> ShardKey:
    return ShardKey(fragment, round_, shard)


def left(value: float, elements: int = 4) -> Tensor:
    return torch.full((elements,), value)


def closed(each: Residuals, at: ShardKey, start: int, stop: int, value: float) -> Tensor | None:
    """The round closes and leaves `value` out; what was added to it."""
    before = each.before(at, start, stop)
    each.keep(at, start, stop, Left(at.round, before, left(value, stop - start)))
    return before


def holds(residual: Tensor | None, expected: Tensor) -> bool:
    return residual is not None and torch.equal(residual, expected)


def test_each_round_takes_what_the_one_before_has_left():
    each = Residuals()
    assert closed(each, key(0), 0, 4, 1.0) is None
    for round_ in range(1, 5):
        assert holds(closed(each, key(round_), 0, 4, round_ + 1.0), left(round_))


def test_a_round_that_is_done_over_takes_the_residual_from_before_it():
    each = Residuals()
    assert closed(each, key(0), 0, 4, 1.0) is None
    assert closed(each, key(0), 0, 4, 1.5) is None
    closed(each, key(1), 0, 4, 2.0)
    for value in (3.0, 4.0):  # done over twice
        assert holds(closed(each, key(1), 0, 4, value), left(1.5))
    assert holds(each.before(key(2), 0, 4), left(4.0))


def test_another_layout_takes_what_it_still_reduces():
    each = Residuals()
    closed(each, key(0), 0, 64, 1.0)
    closed(each, key(0, shard=1), 64, 128, 2.0)
    closed(each, key(0, fragment=1), 0, 64, 4.0)
    for round_ in (0, 1):  # the shards of the new layout, one of them done over
        before = closed(each, key(1), 32, 96, 5.0 + round_)
        assert holds(before, torch.cat((left(1.0, 32), left(2.0, 32))))
    before = closed(each, key(1, shard=1), 96, 192, 7.0)
    assert holds(before, torch.cat((left(2.0, 32), left(0.0, 64))))
    for at, start, stop, value in (
        (key(2), 32, 96, 6.0),
        (key(2, shard=1), 96, 192, 7.0),
        (key(2, fragment=1), 0, 64, 4.0),
    ):
        assert holds(each.before(at, start, stop), left(value, stop - start))


def test_what_another_layout_does_not_take_is_given_up_after_a_round():
    each = Residuals()
    closed(each, key(0), 0, 64, 1.0)
    closed(each, key(1), 32, 64, 2.0)
    each.advanced(0, 1)
    assert each.before(key(1), 0, 32) is not None
    each.advanced(0, 2)
    assert each.before(key(2), 0, 32) is None
    assert each.before(key(2), 32, 64) is not None


def test_a_round_done_over_in_another_layout_takes_what_went_into_it():
    each = Residuals()
    closed(each, key(0), 0, 64, 1.0)
    closed(each, key(1), 0, 64, 2.0)
    assert holds(closed(each, key(1), 0, 32, 3.0), left(1.0, 32))
    assert holds(each.before(key(1), 32, 64), left(1.0, 32))


def test_a_round_that_is_applied_is_not_done_over_and_keeps_one_residual():
    each = Residuals()
    closed(each, key(0), 0, 4, 1.0)
    closed(each, key(1), 0, 4, 1.5)
    each.advanced(0, 2)
    assert each.before(key(1), 0, 4) is None
    assert holds(each.before(key(2), 0, 4), left(1.5))
