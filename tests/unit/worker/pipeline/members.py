"""Peers that serve stages, and what one of them shares among its components."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from murmuration.algorithms.codecs import codec_by_name
from murmuration.worker.membership import Member, Phase
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stages_config import StagesConfig
from tests.support.memory_transport import MemoryNetwork, MemoryTransport

T = TypeVar("T")


def members_of(*stages: int) -> list[Member]:
    """A peer for each, named by where it stands."""
    given = {"start_ms": 1, "phase": Phase.TRAINING}
    return [Member(f"p{n}", f"p{n}", stage=stage, **given) for n, stage in enumerate(stages)]


def telling(member: Member, profile: Profile) -> Member:
    return replace(member, profile=profile.pack())


async def no_search(work: Callable[[], T], /) -> T:
    raise AssertionError("a peer that only answers searches for no routes")


def context_of(me: str, members: Callable[[], Sequence[Member]], **given: Any) -> StageContext:
    """The context of the peer of that name; what is not given does nothing."""
    member = next((member for member in members() if member.peer == me), None)
    defaults: dict[str, Any] = {
        "run": 1,
        "seed": 3,
        "stage": member.stage if member is not None else 0,
        "config": StagesConfig(count=3, microbatches=2),
        "codec": codec_by_name("fp32"),
        "transport": MemoryTransport(MemoryNetwork(), me),
        "suspect": lambda peer: None,
        "post": lambda message: None,
        "offload": no_search,
        "clock": lambda: 0.0,
        "log": lambda event: None,
    }
    return StageContext(me=me, members=members, **(defaults | given))
