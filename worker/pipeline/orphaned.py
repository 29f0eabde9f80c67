"""Stages that have no replica left: told once each, and the end of the run where it is stage 0."""

from collections.abc import Sequence

from worker.membership import Member, Phase

_PATIENCE_S = 2.0  # before a stage is told of
_END_S = 20.0  # without stage 0: time for one of its replicas to start again


def served_stages(members: Sequence[Member]) -> set[int]:
    """The stages with a replica that lives, or that has ended its run by the schedule."""
    return {member.stage for member in members if member.live or member.phase is Phase.DONE}


class OrphanedStages:
    """One peer's eye on stages without a replica; sans-I/O. Times are monotonic seconds."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def look(self, members: Sequence[Member], now: float) -> dict[int, str]:
        """What there is to say, a line by stage; again only of one served in between."""
        served = served_stages(members)
        bare = [stage for stage in range(self._stages) if stage not in served]
        self._since = {stage: self._since.get(stage, now) for stage in bare}
        self._told.intersection_update(bare)
        lines: dict[int, str] = {}
        for stage, since in self._since.items():
            if now - since >= _PATIENCE_S and stage not in self._told:
                self._told.add(stage)
                then = "routes leave it out" if stage else "nobody begins microbatches"
                lines[stage] = f"stage {stage} has no replica left: {then}"
        return lines

    def ends(self, now: float) -> bool:
        """Whether stage 0 was gone for so long, when last looked at, that there is no run left."""
        return now - self._since.get(0, now) >= _END_S
