"""Whom a message says it is from, for its caller's certificate to be held against."""

from collections.abc import Callable, Mapping

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.wire.errors import WireError
from murmuration.worker.wire.messages import parse


def _joining(raw: bytes) -> str | None:
    join = parse(pb.JoinRequest, raw)
    # Asked to dial another back, or what the run is: it says nothing of itself.
    return None if join.dial_only or not join.manifest else join.member.peer


def _leasing(raw: bytes) -> str | None:
    """An announcement is of its sender's own blocks; in answers alone there are others' too."""
    holdings = parse(pb.LeaseNews, raw).holdings
    if len(holdings) != 1:
        raise WireError(f"{len(holdings)} peers' blocks announced; each peer announces its own")
    return holdings[0].peer


def _exchanging(raw: bytes) -> str:
    up = parse(pb.ExchangeUp, raw)
    return up.check.sender if up.HasField("check") else up.header.sender


# By method, of a call or of the first message of a stream; the others speak for nobody.
_SENDERS: Mapping[str, Callable[[bytes], str | None]] = {
    "Control/Join": _joining,
    "Control/Gossip": lambda raw: parse(pb.GossipMessage, raw).sender,
    "Control/Lease": _leasing,
    "Control/Result": lambda raw: parse(pb.ResultRequest, raw).sender,
    "Control/Finished": lambda raw: parse(pb.FinishedRequest, raw).origin,
    "Data/Exchange": _exchanging,
    "Data/Average": _exchanging,
    "Data/PairRound": lambda raw: parse(pb.PairMessage, raw).header.sender,
    "Data/StageCall": lambda raw: parse(pb.StageCallUp, raw).header.sender,
    **dict.fromkeys(
        ("Relay/Reserve", "Relay/Dial", "Relay/Accept"),
        lambda raw: parse(pb.RelayMessage, raw).header.sender,
    ),
}


def claimed_sender(method: str, raw: bytes) -> str | None:
    """The peer that the message says it is from; None where it does not say. Raises WireError."""
    read = _SENDERS.get(method)
    return None if read is None else read(raw)
