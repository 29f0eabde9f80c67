"""Eager updates: the mean to expect is the true one as far as the others do as before."""

import torch

from algorithms.diloco import eager_mean, others_share


def test_the_others_share_and_the_guess_by_hand() -> None:
    """Three peers: 3 + 6 + 9, a mean of 6, to which this peer (3) has brought 1."""
    mean, own = torch.tensor([6.0]), torch.tensor([3.0])
    others = others_share(mean, own, 4)
    assert others.tolist() == [5.25]
    assert eager_mean(torch.tensor([8.0]), others, 4).tolist() == [7.25]


def test_the_guess_is_right_when_everyone_does_the_same_again() -> None:
    mean, own = torch.tensor([1.0, -4.0, 0.5]), torch.tensor([2.0, 0.0, -8.0])
    assert torch.equal(eager_mean(own, others_share(mean, own, 2), 2), mean)


def test_a_peer_alone_expects_its_own() -> None:
    own, g = torch.tensor([2.5]), torch.tensor([-1.5])
    assert eager_mean(g, others_share(own, own, 1), 1).tolist() == [-1.5]
