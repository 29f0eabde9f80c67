"""What each hash covers."""

import torch

from worker import wire
from worker.wire import hash64


def test_a_state_hash_covers_anchor_momentum_and_group() -> None:
    anchor, momentum, group = torch.arange(4.0), torch.ones(4), ("a", "b")
    hashed = wire.state_hash(anchor, momentum, group)
    assert hashed == wire.state_hash(anchor.clone(), momentum.clone(), group)
    whole = b"".join([wire.tensor_bytes(anchor), wire.tensor_bytes(momentum), b"a\nb"])
    assert hashed == hash64(whole)
    for index in range(4):
        for which in range(2):
            state = [anchor.clone(), momentum.clone()]
            state[which][index] += 1e-6 + state[which][index] * 1e-6
            assert wire.state_hash(*state, group) != hashed
    assert wire.state_hash(anchor, momentum, ("a", "c")) != hashed
    assert wire.state_hash(anchor, momentum, ()) != hashed


def test_a_tensor_hash_is_128_bits_of_all_tensors_in_order() -> None:
    first, second = torch.arange(4.0), torch.ones(3)
    hashed = wire.tensor_hash([first, second])
    assert len(hashed) == 32
    assert hashed == wire.tensor_hash([torch.cat([first, second])])
    assert hashed != wire.tensor_hash([second, first])


def test_a_group_hash_depends_on_names_and_order() -> None:
    assert wire.group_hash(["a", "b"]) == wire.group_hash(("a", "b"))
    assert len({wire.group_hash(g) for g in (["a", "b"], ["b", "a"], ["ab"], [])}) == 4
