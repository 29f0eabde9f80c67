"""Cards of peers that serve stages."""

from dataclasses import replace

from worker.membership import Member, Phase
from worker.pipeline.profile import Profile


def cards_of(*stages: int) -> list[Member]:
    """A peer for each, named by where it stands."""
    return [
        Member(f"p{n}", f"p{n}", epoch=1, phase=Phase.TRAINING, stage=stage)
        for n, stage in enumerate(stages)
    ]


def telling(member: Member, profile: Profile) -> Member:
    """With what the peer has measured."""
    return replace(member, profile=profile.pack())
