"""What one peer says to another, as bytes and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.membership import Digest, Member
from murmuration.worker.membership.dissemination import GossipMessage, MemberProgress
from murmuration.worker.membership.first_contact import undialable
from murmuration.worker.membership.gossip import from_gossip_message, to_gossip_message

U64 = st.integers(0, 2**64 - 1)
SAID = st.builds(
    GossipMessage,
    members=st.lists(st.builds(Member, st.just("w1"), st.just("host:1"), U64), max_size=3).map(
        tuple
    ),
    progress=st.none() | st.builds(MemberProgress, U64, U64, U64),
    number=U64,
    acknowledged=U64,
    reset=st.booleans(),
    full=st.booleans(),
)


def sent(said: GossipMessage, sender: str, run: int) -> pb.GossipMessage:
    return to_gossip_message(said, sender, run, [*map(wire.member_to_message, said.members)])


@given(SAID)
def test_what_is_said_survives_the_wire(said: GossipMessage) -> None:
    raw = sent(said, "w0", 2**64 - 1).SerializeToString()
    message = wire.parse(pb.GossipMessage, raw)
    assert from_gossip_message(message, said.members) == said
    assert (message.sender, message.run) == ("w0", 2**64 - 1)


@pytest.mark.parametrize(
    ("theirs", "mine", "says"),
    [
        ("127.0.0.1:1", "127.0.0.1:2", None),
        ("192.0.2.1:1", "192.0.2.2:2", None),
        ("w1.example:1", "192.0.2.2:2", None),
        ("localhost:1", "127.0.0.1:2", None),
        ("0.0.0.0:7700", "192.0.2.2:2", "nobody can dial 0.0.0.0:7700"),
        ("unix:/tmp/socket", "192.0.2.2:2", "is no HOST:PORT"),
        ("dns:///w1.example:7700", "192.0.2.2:2", "is no HOST:PORT"),
        ("[::]:7700", "127.0.0.1:2", "nobody can dial"),
        ("127.0.0.1:1", "192.0.2.2:2", "from its own machine only"),
        ("192.0.2.1:1", "127.0.0.1:2", "start the peer at 127.0.0.1:2 with"),
    ],
)
def test_loopback_only_among_peers_on_loopback(theirs: str, mine: str, says: str | None) -> None:
    refusal = undialable(theirs, mine)
    assert refusal is None if says is None else refusal and says in refusal


def test_without_news_a_message_takes_a_few_bytes() -> None:
    heard = GossipMessage(number=0, acknowledged=10_000)
    assert sent(heard, "w0", 1).ByteSize() <= 16
    asked = GossipMessage(progress=MemberProgress(2**40, 100_000, 100_000), acknowledged=10_000)
    assert sent(asked, "w0", 1).ByteSize() <= 40
    member = Member("w1", "10.0.0.1:7000", 2**40, digests=(Digest(9, 4, 2**63),) * 4)
    assert sent(GossipMessage((member,)), "w0", 1).ByteSize() > 100
