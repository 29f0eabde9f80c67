"""Between two rounds: how far partners are apart, and when anchors are told or not waited for."""

from murmuration.algorithms.plan import PRESETS
from murmuration.worker import wire
from murmuration.worker.exchange.pairwise.pair_rounds import AnchorPrefetch
from murmuration.worker.exchange.pairwise.round import ANCHOR, OwnPart, PairRound, TheirPart
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View

CONFIG = RoundConfig(floor_mbps=1e-5)  # 12 bytes take 9.6 s
LAID_S = 100.0


class Prefetch(AnchorPrefetch):
    """The prefetch of peer `b`, whose partners send 24 bytes a round at 1 MB/s."""

    def __init__(self) -> None:
        super().__init__(CONFIG, PRESETS["noloco"], [24])
        self.arrived(100, 0.0001)


def lay(group: str = "abc") -> PairRound:
    return PairRound("b", group, (0, 7), {ANCHOR: own(12)}, LAID_S, View(), CONFIG)


def own(size_bytes: int) -> OwnPart:
    return OwnPart(wire.Payload.of(memoryview(bytes(size_bytes))))


def came(prefetch: AnchorPrefetch, laid: PairRound, peers: str) -> list[bool]:
    said = []
    for peer in peers:
        laid.partners[peer].parts[ANCHOR] = TheirPart(wire.Incoming(12, 2), checked=True)
        said.append(prefetch.came(laid))
    return said


def test_it_is_told_once_when_all_anchors_are_there():
    prefetch, laid = Prefetch(), lay()
    assert not prefetch.laid(laid, 9)
    assert came(prefetch, laid, "acc") == [False, True, False]
    assert prefetch.due_at(laid) is None
    assert not prefetch.overdue(laid, LAID_S + 99)


def test_nobody_waits_for_a_partner_of_which_nothing_comes():
    prefetch, laid = Prefetch(), lay()
    assert prefetch.due_at(laid) == LAID_S + 1.0
    assert not prefetch.overdue(laid, LAID_S + 0.9)
    laid.heard = LAID_S + 0.9
    assert not prefetch.overdue(laid, LAID_S + 1.8)
    assert prefetch.overdue(laid, LAID_S + 1.9)
    assert not prefetch.overdue(laid, LAID_S + 2.1), "said once"
    assert came(prefetch, laid, "ac") == [False, True], "what comes later is told all the same"


def test_a_partner_that_trickles_is_not_waited_for_for_ever():
    prefetch, laid = Prefetch(), lay()
    until, now = LAID_S + 1.0 + CONFIG.transfer_s(12), LAID_S
    while now < until - 0.9:
        now += 0.9
        laid.heard = now - 0.1
        assert not prefetch.overdue(laid, now)
    laid.heard = until - 0.1
    assert prefetch.overdue(laid, until)


def test_where_all_are_one_group_they_have_one_anchor_if_the_last_round_was_held():
    for succeeded, members, said in [(True, 2, True), (True, 3, False), (False, 2, False)]:
        prefetch, before = Prefetch(), lay("ab")
        before.succeeded, before.failed = succeeded, "" if succeeded else "lost"
        prefetch.ended(before)
        assert prefetch.laid(lay("ab"), members) is said
