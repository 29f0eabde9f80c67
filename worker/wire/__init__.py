"""Turns tensors and members into messages and back. Nothing from the network is trusted.

Sizes are checked against what the manifest implies before anything is allocated, then the hash of
each frame, then the hash of the whole, then that the values are finite. Nothing is ever unpickled.

`tensors` knows torch; `payloads` and `messages` know the protos; this package knows both, and no
other does.
"""

from murmuration.worker.wire.messages import (
    FalseHeader,
    Reduction,
    ReductionHeader,
    claimed_sender,
    counted_members,
    history_from_message,
    history_to_message,
    lease_news_from_message,
    lease_news_to_message,
    member_from_message,
    member_to_message,
    parse,
    reduction_from_message,
    reduction_to_message,
    refusal,
    refusal_kind,
    signed_member_to_message,
    status_reply,
    unpack_document,
)
from murmuration.worker.wire.payloads import (
    HASH_BYTES,
    MAX_FRAME_BYTES,
    ROUNDED,
    Commitment,
    Incoming,
    Leaves,
    Payload,
    frame_messages,
    payload_messages,
    root_of,
)
from murmuration.worker.wire.tensors import (
    Again,
    WireError,
    are_finite,
    average,
    check_values,
    decode,
    distance,
    encode,
    encoded_bytes,
    encoding_error,
    group_hash,
    hash64,
    is_finite,
    norms_of,
    split_state,
    state_bytes,
    state_hash,
    state_parts,
    tensor_hash,
)
