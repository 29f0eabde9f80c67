"""Turns tensors and members into messages and back. Nothing from the network is trusted.

Sizes are checked against what the manifest implies before anything is allocated, then the hash of
each frame, then the hash of the whole, then that the values are finite. Nothing is ever unpickled.

`tensors` knows torch; `leases`, `payloads` and `messages` know the protos; this package knows
both, and no other does.
"""

from murmuration.worker.wire.claims import claimed_sender
from murmuration.worker.wire.commitments import HASH_BYTES, Commitment, Leaves, root_of
from murmuration.worker.wire.errors import Again, WireError
from murmuration.worker.wire.history import history_from_message, history_to_message
from murmuration.worker.wire.leases import lease_news_from_message, lease_news_to_message
from murmuration.worker.wire.messages import (
    Reduction,
    check_name,
    contribution_from_message,
    contribution_to_message,
    counted_members,
    member_from_message,
    member_to_message,
    parse,
    reduction_from_message,
    reduction_to_message,
    refusal,
    refusal_kind,
    refusal_to_message,
    signed_member_to_message,
    status_reply,
    unpack_document,
)
from murmuration.worker.wire.payloads import (
    MAX_FRAME_BYTES,
    Incoming,
    Payload,
    frame_messages,
    payload_messages,
)
from murmuration.worker.wire.tensors import (
    BLOCK_ELEMENTS,
    are_finite,
    average,
    bytes_tensor,
    check_values,
    decode,
    encode,
    encoded_bytes,
    encoding_error,
    group_hash,
    hash64,
    is_finite,
    split_state,
    state_hash,
    state_parts,
    tensor_bytes,
    tensor_hash,
)

__all__ = [
    "BLOCK_ELEMENTS",
    "HASH_BYTES",
    "MAX_FRAME_BYTES",
    "Again",
    "Commitment",
    "Incoming",
    "Leaves",
    "Payload",
    "Reduction",
    "WireError",
    "are_finite",
    "average",
    "bytes_tensor",
    "check_name",
    "check_values",
    "claimed_sender",
    "contribution_from_message",
    "contribution_to_message",
    "counted_members",
    "decode",
    "encode",
    "encoded_bytes",
    "encoding_error",
    "frame_messages",
    "group_hash",
    "hash64",
    "history_from_message",
    "history_to_message",
    "is_finite",
    "lease_news_from_message",
    "lease_news_to_message",
    "member_from_message",
    "member_to_message",
    "parse",
    "payload_messages",
    "reduction_from_message",
    "reduction_to_message",
    "refusal",
    "refusal_kind",
    "refusal_to_message",
    "root_of",
    "signed_member_to_message",
    "split_state",
    "state_hash",
    "state_parts",
    "status_reply",
    "tensor_bytes",
    "tensor_hash",
    "unpack_document",
]
