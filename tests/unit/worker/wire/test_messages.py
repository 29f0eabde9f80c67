"""Members, histories and leases to messages and back; and which messages are refused."""

import os
import pickle
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, strategies as st

from murmuration.algorithms.counted import (
    MOST_PARTS,
    RECORDED_ROUNDS,
    CountedRound,
    History,
    counted_of,
    recorded,
    without,
)
from murmuration.algorithms.fragments import union
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack
from murmuration.worker import wire
from murmuration.worker.leases.ledger import Block, Holding, LeaseNews, OpenedStream
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import MAX_UNREACHABLE, Health, Phase
from murmuration.worker.wire import (
    WireError,
    history_from_message,
    history_to_message,
    lease_news_from_message,
    lease_news_to_message,
    parse,
)

KINDS = [
    pb.Member, pb.JoinRequest, pb.JoinReply, pb.GossipMessage, pb.ProbeRequest, pb.ProbeReply,
    pb.StatusReply, pb.Frame, pb.ExchangeUp, pb.ExchangeDown, pb.FetchRequest, pb.FetchReply,
    pb.IntroduceRequest, pb.IntroduceReply,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["run", "group", "pruned", "invalid", "again"])
def test_a_refusal_says_why_and_one_of_a_later_version_ends_the_round(kind):
    refusal = wire.refusal(kind, "closed long ago")
    assert refusal.reason == "closed long ago"
    assert pb.RefusalCode.Name(refusal.code) == f"REFUSAL_{kind.upper()}"
    assert wire.refusal_kind(refusal) == kind
    assert wire.refusal_kind(pb.Refusal()) == "invalid"


@dataclass
class Malicious:
    """Unpickling this creates a file."""

    path: Path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_executed(tmp_path, protocol):
    trap = tmp_path / "executed"
    raw = pickle.dumps(Malicious(trap), protocol=protocol)
    for kind, no_message in product(KINDS, (raw, b"\x0f\xff\xff")):
        with pytest.raises(WireError, match=f"^not a {kind.__name__}$"):
            parse(kind, no_message)
    for document in (raw, zstandard.compress(raw), pack(raw)):
        with pytest.raises(WireError):
            Manifest.unpack(document)
    assert not trap.exists()


def test_ours_and_the_wires_enums_name_the_same_things():
    assert {f"HEALTH_{h.name}": int(h) for h in Health} == dict(pb.Health.items())
    assert {f"PHASE_{p.name}": int(p) for p in Phase} == dict(pb.Phase.items())


@pytest.mark.parametrize("name", ["", "x" * 257, "\N{BIRD}" * 65])
def test_names_are_of_1_to_256_bytes(name):
    for member in (pb.Member(peer=name, address="a"), pb.Member(peer="a", address=name)):
        with pytest.raises(WireError, match="no name or address of a peer; take 1 to 256 bytes"):
            wire.member_from_message(member)
    with pytest.raises(WireError, match="no name or address of a peer; take 1 to 256 bytes"):
        wire.member_from_message(pb.Member(peer="a", address="a", unreachable=["b", name]))
    longest = "\N{BIRD}" * 64
    assert wire.member_from_message(pb.Member(peer=longest, address="a")).peer == longest


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *((field, value, f"{value} is not a valid")
          for field in ("health", "phase") for value in (5, 99, -1)),
        ("unreachable", [f"w{index}" for index in range(MAX_UNREACHABLE + 1)],
         f"{MAX_UNREACHABLE + 1} peers out of its reach"),
        ("unreachable", ["w3"], "itself or a peer twice"),
        ("unreachable", ["a", "b", "a"], "itself or a peer twice"),
        ("address", "a@h:1", "'a@h:1' leads to another"),
        ("address", "w3@a@h:1", "'w3@a@h:1' leads to another"),
        *(("address", address, "'.*' is no HOST:PORT") for address in
          ("unix:/tmp/socket", "dns:///w1.example:7700", "h:99999", "h:1,", "h:1,unix:/tmp/socket",
           "w3@", "w3@h:1,", "w3@unix:/tmp/socket", "w3@h:1;unix:/tmp/socket")),
    ],
)  # fmt: skip
def test_what_a_member_cannot_be_is_refused(field, value, says):
    with pytest.raises(WireError, match=f"^peer w3: {says}"):
        wire.member_from_message(pb.Member(**{"peer": "w3", "address": "a", field: value}))


def test_a_member_list_is_bounded():
    members = [pb.Member(peer="a", address="b")] * 4097
    assert len(wire.counted_members(members[:4096])) == 4096
    with pytest.raises(WireError, match="4097 peers in one message; at most 4096"):
        wire.counted_members(members)


HISTORY = (
    CountedRound(3, ((0, 4, ("a", "b")), (4, 10, ("b",)))),
    CountedRound(4, ((0, 10, ("a", "b", "c")),)),
)


@pytest.mark.parametrize(
    ("history", "elements", "most_peers"),
    [
        (HISTORY, 9, 3),
        (HISTORY, 10, 2),
        (HISTORY * RECORDED_ROUNDS, 10, 3),
        ((CountedRound(0, ((4, 8, ("a",)), (0, 4, ("a",)))),), 10, 3),
        ((CountedRound(0, tuple((k, k + 1, ("a",)) for k in range(MOST_PARTS + 1))),), 999, 3),
        ((CountedRound(0, ((0, 10, ("a", "a")),)),), 10, 3),
    ],
    ids=["past the end", "too many peers", "too long", "out of order", "too many parts", "twice"],
)
def test_what_fits_no_fragment_is_refused(history, elements, most_peers):
    with pytest.raises(WireError):
        history_from_message(history_to_message(history), elements, most_peers)


def test_a_place_beyond_the_peers_is_refused():
    part = pb.CountedPart(start=0, stop=4, contributors=[1])
    with pytest.raises(WireError):
        history_from_message(pb.History(peers=["a"], rounds=[pb.CountedRound(parts=[part])]), 10, 3)


def test_shards_of_the_same_peers_are_one_part_and_old_rounds_go():
    history: History = ()
    for round_ in range(RECORDED_ROUNDS + 2):
        parts = [(4, 6, ("a",)), (0, 2, ("a", "b")), (2, 4, ("a", "b"))]
        history = recorded(history, round_, parts)
    assert [each.round for each in history] == list(range(2, RECORDED_ROUNDS + 2))
    assert history[0].parts == ((0, 4, ("a", "b")), (4, 6, ("a",)))
    assert counted_of(history, 5, "b") == ((0, 4),)
    assert counted_of(history, 5, "a") == ((0, 6),)
    assert counted_of(history, 5, "c") == ()
    assert counted_of(history, 1, "a") is None
    assert recorded(history, 99, ()) is history


def test_ranges_without_others():
    assert without(((0, 4), (6, 9)), ((1, 2), (3, 7))) == ((0, 1), (2, 3), (7, 9))
    assert without(((0, 4),), ()) == ((0, 4),)
    assert without(((0, 4),), ((0, 4),)) == ()


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
def test_news_come_back_as_they_were(news):
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
        (message(holdings=[pb.BlockHolding(peer="")]), "no name or address of a peer"),
        (message(holdings=[pb.BlockHolding(peer="a", held=[pb.SampleBlock()] * 1025)]), "1025"),
        (message(holdings=[pb.BlockHolding(peer="a", streams=[pb.OpenedStream()] * 65)]), "65 str"),
        (message(ledgers=[pb.StreamLedger(stream=n) for n in range(1025)]), "1025 streams"),
        (message(ledgers=[pb.StreamLedger(done=[1])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[4, 0])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[1, 2**63])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[1, 3, 0, 5])]), "no list of ranges"),
        (message(ledgers=[pb.StreamLedger(done=[1] * 2**15)]), "no list of ranges"),
    ],
)
def test_what_no_peer_says_is_refused(news, reason):
    with pytest.raises(WireError, match=reason):
        lease_news_from_message(news, 5)
