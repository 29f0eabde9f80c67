"""What one peer says to another, as bytes and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import murmuration_pb2 as pb
from worker import wire
from worker.membership import Digest, GossipMessage, Member, Progress
from worker.membership.gossip import gossip_message, said_in

U64 = st.integers(0, 2**64 - 1)
SAID = st.builds(
    GossipMessage,
    members=st.lists(st.builds(Member, st.just("w1"), st.just("host:1"), U64), max_size=3).map(
        tuple
    ),
    progress=st.none() | st.builds(Progress, U64, U64, U64),
    number=U64,
    acknowledged=U64,
    anew=st.booleans(),
    full=st.booleans(),
)


@given(SAID)
def test_what_is_said_survives_the_wire(said: GossipMessage) -> None:
    raw = gossip_message(said, "w0", 2**64 - 1).SerializeToString()
    message = wire.parse(pb.GossipMessage, raw)
    assert said_in(message) == said
    assert (message.sender, message.run) == ("w0", 2**64 - 1)


def test_a_bad_card_is_refused() -> None:
    message = gossip_message(GossipMessage((Member("w1", "", 1),)), "w0", 1)
    with pytest.raises(wire.WireError, match="a name or address of 0 characters"):
        said_in(message)


def test_without_news_a_message_takes_a_few_bytes() -> None:
    heard = GossipMessage(number=0, acknowledged=10_000)
    assert gossip_message(heard, "w0", 1).ByteSize() <= 16
    asked = GossipMessage(progress=Progress(2**40, 100_000, 100_000), acknowledged=10_000)
    assert gossip_message(asked, "w0", 1).ByteSize() <= 40
    member = Member("w1", "10.0.0.1:7000", 2**40, digests=(Digest(9, 4, 2**63),) * 4)
    assert gossip_message(GossipMessage((member,)), "w0", 1).ByteSize() > 100
