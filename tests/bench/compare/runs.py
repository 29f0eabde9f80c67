"""How a single run ended, whatever ran it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Args:
    report: None where there is none to be trusted.
    problem: why, in one line.
    exit_code: 128 + the signal that stopped it; else one of `coordinator.errors.Exit`.
    """

    report: Mapping[str, Any] | None = None
    problem: str | None = None
    exit_code: int = 0

    @property
    def interrupted(self) -> bool:
        return self.exit_code > 128
