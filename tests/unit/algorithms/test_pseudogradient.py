import torch

from algorithms.diloco import Nesterov, pseudo_gradient


def test_the_pseudo_gradient_is_anchor_minus_local_and_fresh() -> None:
    anchor, local = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.25, -2.0, 1.0])
    g = pseudo_gradient(anchor, local)
    assert g.tolist() == [0.75, 0.0, -0.5]
    local.zero_()
    anchor.zero_()
    assert g.tolist() == [0.75, 0.0, -0.5]


def test_a_plain_outer_step_along_it_lands_on_the_local_parameters() -> None:
    anchor, local = torch.tensor([1.0, -2.0]), torch.tensor([0.25, 4.0])
    g = pseudo_gradient(anchor, local)
    landed, _ = Nesterov(lr=1.0, momentum=0.0).step(anchor, torch.zeros(2), g)
    assert torch.equal(landed, local)
