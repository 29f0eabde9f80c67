"""What is used of a stream: ranges and cursors that merge in any order."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from murmuration.worker.leases import Ledger
from murmuration.worker.leases.ledger import EPOCH_BLOCKS, Block

BLOCKS = st.lists(st.integers(0, 30), max_size=8)


def ledger_of(blocks: list[int], cursors: dict[int, int] | None = None) -> Ledger:
    ledger = Ledger()
    for number in blocks:
        ledger.finish(1, number, number + 1)
    ledger.merge({}, {Block(1, number): used for number, used in (cursors or {}).items()})
    return ledger


@given(st.lists(BLOCKS, min_size=1, max_size=4))
def test_merging_is_a_union_in_any_order(parts: list[list[int]]) -> None:
    ledgers = [ledger_of(part) for part in parts]
    merged = Ledger()
    for each in (*reversed(ledgers), *ledgers):
        merged.merge(each.done, each.cursors)
    used = set(itertools.chain(*parts))
    assert {n for n in range(40) if merged.is_done(Block(1, n))} == used
    assert list(merged.free(1, 0, 40, None, {3, 39})) == [
        n for n in range(39) if n not in used | {3}
    ]


def test_free_blocks_of_several_epochs_leave_out_what_an_epoch_does_not_have() -> None:
    ledger = ledger_of([0, 1])
    stop = 2 * EPOCH_BLOCKS
    assert list(ledger.free(1, 0, stop, 3, ())) == [
        2,
        EPOCH_BLOCKS,
        EPOCH_BLOCKS + 1,
        EPOCH_BLOCKS + 2,
    ]


def test_a_checkpoint_holds_it_as_plain_values() -> None:
    ledger = ledger_of([0, 1, 5], {7: 3})
    again = ledger_of([77], {78: 1})
    again.load(json.loads(json.dumps(ledger.plain())))
    assert (again.done, again.cursors) == (ledger.done, ledger.cursors)


def test_what_others_say_is_bounded() -> None:
    ledger = Ledger()
    ledger.merge(dict.fromkeys(range(2000), ((0, 1),)), {})
    ledger.merge({}, {Block(5000, number): 1 for number in range(70_000)})
    assert (len(ledger.done), len(ledger.cursors)) == (1024, 65_536)
