"""The attacks on a worker that serves a stage: microbatches, and the end of others'."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import grpc

from murmuration.algorithms.codecs import codec_by_name
from murmuration.protos import murmuration_pb2 as pb
from tests.support.attacker import (
    AT_THE_HANDSHAKE,
    Attack,
    Target,
    expect,
    now_ms,
    refusal_of,
    repeated,
)
from tests.support.workers import settings_of

# A batch of 2 samples of 32 bytes, 32 wide, as `SMALL` has it; eight of them have a place.
BATCH = (2, 32, 32)
STAGES = settings_of(stages__count=2, stages__microbatches=4, stages__memory_mib=0.1)
_STREAMS = 14  # gRPC lets 16 go on at once
_AHEAD = 4  # iterations: the stage is there soon


def header(target: Target, origin: str, shape: tuple[int, int, int]) -> pb.StageCallUp:
    """The header of a microbatch of an iteration to come, for the attacked worker's stage."""
    codec = codec_by_name(target.config.stages.activations)
    return pb.StageCallUp(
        header=pb.StageCallHeader(
            run=target.manifest.run,
            iteration=(target.seen(target.swarm.names[0]) or {"step": 0})["step"] + _AHEAD,
            origin=origin,
            sender=target.named("x"),
            stage=1,
            codec=codec.wire_id,
            shape=shape,
            total_bytes=codec.encoded_bytes(math.prod(shape)),
        )
    )


def unlike_microbatch(target: Target, shape: tuple[int, int, int], problem: str) -> str:
    """Announced with another shape than this run's, and not sent."""
    replies = target.stranger.stream("Data/StageCall", [header(target, "x", shape)])
    failed = pb.StageCallDown.FromString(next(replies)).failed
    expect(problem in failed.reason, "refused for something else:", failed.reason)
    return f"refused: {failed.reason}"


@contextmanager
def held_microbatches(target: Target, *, forged: bool = False) -> Iterator[Callable[[], str]]:
    """As large as those of others, of an honest origin, and none of them is ever sent. Args:
    forged: of a later process of it each time."""
    open_, starts = list[grpc.Call](), count(now_ms())

    def once() -> str:
        if forged and open_:
            open_.pop(0).cancel()
        while len(open_) < _STREAMS:
            origin = target.swarm.names[1]
            begun = header(target, origin, BATCH)
            begun.header.start_ms = next(starts) if forged else target.member(origin).start_ms
            stream = target.stranger.stream("Data/StageCall", [begun])
            open_.append(stream)  # type: ignore[arg-type]  # its stubs know an iterator only
        ended = [stream for stream in open_ if not stream.is_active()]  # type: ignore[attr-defined]  # not in its stubs
        expect(len(ended) < len(open_), "it has given up")
        return f"{len(open_) - len(ended)} of {len(open_)} microbatches are waited for"

    yield once
    for stream in open_:
        stream.cancel()


def forged_iteration(target: Target) -> str:
    """The origin's report on its own microbatches, of which none has come back."""
    origin = target.swarm.names[1]
    known = target.member(origin)
    end = pb.FinishedRequest(
        run=target.manifest.run, origin=origin, start_ms=known.start_ms, iteration=known.step + 1
    )
    try:
        target.stranger.call("Control/Finished", end, pb.FinishedReply)
        said = "answered"
    except grpc.RpcError as error:
        said = refusal_of(error)
        if said == AT_THE_HANDSHAKE:
            raise
    expect("does not speak for" in said, "refused otherwise:", said)
    return said


ON_STAGES: dict[str, Attack] = {
    "a microbatch of 63 MiB": repeated(
        partial(unlike_microbatch, shape=(8, 129024, 32), problem="a batch of this run")
    ),
    "a microbatch of 16 GiB": repeated(
        partial(unlike_microbatch, shape=(65536, 4096, 32), problem="a batch of this run")
    ),
    "a microbatch of another width": repeated(
        partial(unlike_microbatch, shape=(2, 32, 48), problem="of width 48")
    ),
    "microbatches that do not come": held_microbatches,
    "microbatches of another's next process": partial(held_microbatches, forged=True),
    "the end of another's iteration": repeated(forged_iteration),
}
