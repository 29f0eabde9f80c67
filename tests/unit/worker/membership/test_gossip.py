"""How much one peer says to another, and which addresses nobody can dial."""

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership.first_contact import undialable


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
    head = {"sender": "w0", "run": 1, "acknowledged": 10_000}
    assert pb.GossipMessage(**head).ByteSize() <= 16
    progress = pb.MemberProgress(epoch=2**40, heartbeat=100_000, step=100_000)
    assert pb.GossipMessage(progress=progress, **head).ByteSize() <= 40
