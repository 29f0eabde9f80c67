"""Who holds which blocks, on the wire: it comes back as it was, or is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.fragments import union
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.leases.types import Block, Holding, LeaseNews, OpenedStream
from murmuration.worker.wire import WireError, lease_news_from_message, lease_news_to_message, parse

STREAMS = st.integers(0, 2**64 - 1)
BLOCKS = st.builds(Block, STREAMS, st.integers(0, 2**50))
OPENED = st.builds(OpenedStream, STREAMS, st.integers(0, 2**32 - 1), st.integers(0, 2**60))
HOLDINGS = st.builds(
    Holding,
    st.text("abc", min_size=1),
    st.integers(0, 2**60),
    st.integers(0, 2**60),
    st.lists(BLOCKS, max_size=3).map(tuple),
    st.lists(BLOCKS, max_size=3).map(tuple),
    st.lists(OPENED, max_size=3).map(tuple),
)
RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda pairs: union([(start, start + size) for start, size in pairs], ())
)
NEWS = st.builds(
    LeaseNews,
    st.lists(HOLDINGS, min_size=1, max_size=3).map(tuple),
    st.dictionaries(STREAMS, RANGES, max_size=3),
    st.dictionaries(BLOCKS, st.integers(1, 2**40), max_size=3),
)


@given(NEWS)
def test_news_come_back_as_they_were(news: LeaseNews) -> None:
    raw = lease_news_to_message(news, 5).SerializeToString()
    again = lease_news_from_message(parse(pb.LeaseNews, raw), 5)
    assert (again.holdings, again.cursors) == (news.holdings, news.cursors)
    assert {stream: ranges for stream, ranges in again.done.items() if ranges} == news.done


def message(**changed: object) -> pb.LeaseNews:
    holding = pb.BlockHolding(peer="a")
    return pb.LeaseNews(**{"run": 5, "holdings": [holding], **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (message(run=6), "another run's"),
        (message(holdings=[]), "0 holdings"),
        (message(holdings=[pb.BlockHolding(peer="")]), "name or address of 0"),
        (message(holdings=[pb.BlockHolding(peer="a", held=[pb.SampleBlock()] * 1025)]), "1025"),
        (
            message(holdings=[pb.BlockHolding(peer="a", streams=[pb.OpenedStream()] * 65)]),
            "65 streams of one peer",
        ),
        (message(ledgers=[pb.StreamLedger(stream=n) for n in range(1025)]), "1025 streams"),
        (message(ledgers=[pb.StreamLedger(done=[1])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[4, 0])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[1, 2**63])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[1, 3, 0, 5])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[1] * 2**15)]), "no list of ranges"),
    ],
)
def test_what_no_peer_says_is_refused(news: pb.LeaseNews, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        lease_news_from_message(news, 5)
