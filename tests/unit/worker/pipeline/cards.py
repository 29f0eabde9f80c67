"""Cards of peers that serve stages."""

from dataclasses import replace

from worker.membership import Card, Phase
from worker.pipeline.profile import Profile


def cards_of(*stages: int) -> list[Card]:
    """A peer for each, named by where it stands."""
    return [
        Card(f"p{n}", f"p{n}", epoch=1, phase=Phase.TRAINING, stage=stage)
        for n, stage in enumerate(stages)
    ]


def telling(card: Card, profile: Profile) -> Card:
    """With what the peer has measured."""
    return replace(card, profile=profile.pack())
