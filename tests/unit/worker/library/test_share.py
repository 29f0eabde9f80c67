"""Every batch is drawn by exactly one peer as long as the peers stay."""

import itertools

import torch
from torch.utils.data import DataLoader, TensorDataset

from worker.library.share import SharePosition, share


def drawn(loader: object, peers: int, epochs: int = 1) -> list[list[object]]:
    """What each peer draws, epoch after epoch, each from a loader of its own."""
    return [
        [
            item
            for _ in range(epochs)
            for item in share(loader, 7, lambda mine=mine: SharePosition(mine, peers))  # type: ignore[arg-type, misc]
        ]
        for mine in range(peers)
    ]


def test_items_of_any_iterable_go_round() -> None:
    assert drawn(range(7), 3) == [[0, 3, 6], [1, 4], [2, 5]]


def loader(*, shuffle: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(24)), batch_size=4, shuffle=shuffle)


def values(batches: list[object]) -> list[int]:
    return [int(value) for (batch,) in batches for value in batch]  # type: ignore[attr-defined]


def test_a_shuffled_data_set_is_drawn_once_in_an_order_common_to_all() -> None:
    shares = [
        values(list(share(loader(shuffle=True), 7, lambda mine=mine: SharePosition(mine, 3))))  # type: ignore[misc]
        for mine in range(3)
    ]
    together = list(itertools.chain(*shares))
    assert sorted(together) == list(range(24))
    assert together != list(range(24))
    assert [len(each) for each in shares] == [8, 8, 8]


def test_each_epoch_has_an_order_of_its_own() -> None:
    again = loader(shuffle=True)
    first, second = (values(list(share(again, 7, lambda: SharePosition(0, 1)))) for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(24))


def test_an_order_that_is_not_random_is_kept() -> None:
    assert values(list(share(loader(shuffle=False), 7, lambda: SharePosition(0, 1)))) == list(
        range(24)
    )


def test_who_leaves_hands_its_place_on() -> None:
    peers = iter([2, 2, 2, 1, 1, 1, 1, 1, 1, 1])
    assert list(share(range(6), 7, lambda: SharePosition(0, next(peers)))) == [0, 2, 3, 4, 5]


def test_ranks_of_a_site_draw_as_many_each() -> None:
    shares = {
        (mine, rank): list(share(range(11), 7, lambda m=mine, r=rank: SharePosition(m, 2, r, 2)))  # type: ignore[misc]
        for mine in range(2)
        for rank in range(2)
    }
    assert shares == {(0, 0): [0, 4, 8], (0, 1): [1, 5, 9], (1, 0): [2, 6], (1, 1): [3, 7]}
