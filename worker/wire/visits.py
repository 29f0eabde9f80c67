"""Visits and their answers to messages and back."""

import math

from algorithms.codecs import Codec
from protos import murmuration_pb2 as pb
from worker.pipeline.stage_call import Hop, Incarnation, Key, StageCall
from worker.wire.errors import WireError
from worker.wire.payloads import Payload

_MAX_STAGES = 1024


class VisitTooLarge(WireError):
    """Activations that no visit may hold on this peer."""


def visit_header(visit: StageCall, run: int, codec: Codec, payload: Payload) -> bytes:
    return pb.VisitUp(
        header=pb.VisitHeader(
            run=run,
            iteration=visit.key.iteration,
            origin=visit.key.origin.peer,
            epoch=visit.key.origin.epoch,
            microbatch=visit.key.microbatch,
            sender=visit.sender,
            stage=visit.stage,
            rest=[pb.Hop(stage=hop.stage, peer=hop.peer) for hop in visit.rest],
            codec=codec.wire_id,
            shape=visit.shape,
            total_bytes=len(payload.raw),
            hash=payload.hash,
            schedule=visit.schedule,
        )
    ).SerializeToString()


def visit_of(header: pb.VisitHeader, run: int, codec: Codec, limit_bytes: int) -> StageCall:
    """Raises WireError: another run or codec, or sizes that do not fit one another; VisitTooLarge:
    they do, but not this peer."""
    if header.run != run:
        raise WireError("a visit of another run")
    if header.codec != codec.wire_id:
        raise WireError(f"activations in codec {header.codec}; this run's is {codec.name}")
    shape = tuple(header.shape)
    if len(shape) != 3 or min(shape) < 1:
        raise WireError(f"activations of shape {shape}")
    expected_bytes = codec.encoded_bytes(math.prod(shape))
    if header.total_bytes != expected_bytes:
        raise WireError(
            f"activations of {header.total_bytes} bytes; shape {shape} takes {expected_bytes}"
        )
    if expected_bytes > limit_bytes:
        raise VisitTooLarge(
            f"[stages] memory_mib: the activations of one microbatch take "
            f"{expected_bytes / 2**20:.2g} MiB, of which {limit_bytes / 2**20:.2g} are taken here; "
            "raise memory_mib on this machine, or make batches smaller"
        )
    if max(len(header.rest), header.stage) > _MAX_STAGES:
        raise WireError(f"a route of {len(header.rest)} stages")
    return StageCall(
        key=Key(header.iteration, Incarnation(header.origin, header.epoch), header.microbatch),
        stage=header.stage,
        rest=tuple(Hop(hop.stage, hop.peer) for hop in header.rest),
        shape=shape,
        schedule=header.schedule,
        sender=header.sender,
    )


def gradient_header(payload: Payload, path: tuple[str, ...]) -> bytes:
    return pb.VisitDown(
        gradient=pb.Gradient(total_bytes=len(payload.raw), hash=payload.hash, path=path)
    ).SerializeToString()


def visit_failed(reason: str, *, elsewhere: bool) -> bytes:
    failed = pb.VisitFailed(reason=reason, elsewhere=elsewhere)
    return pb.VisitDown(failed=failed).SerializeToString()
