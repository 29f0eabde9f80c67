"""When real peers took their early starts: it depends on the network, and on it depend bits."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


class AnchorPrefetch:
    """A stand-in for `specification.ReferenceRun`, by the `early_start` events of each peer."""

    def __init__(self, events: Mapping[str, Iterable[Event]]) -> None:
        self._steps = {
            (peer, event["fragment"], event["round"]): event["step"]
            for peer, told in events.items()
            for event in told
            if event["event"] == "early_start"
        }

    @classmethod
    def of_run(cls, out: Path) -> "AnchorPrefetch":
        files = out.glob("*/events.jsonl")
        return cls({f.parent.name: map(json.loads, f.read_text().splitlines()) for f in files})

    def __call__(self, peer: str, fragment: int, round_: int, applied_at: int) -> int | None:
        """The step after which the peer took it; None if it did not."""
        return self._steps.get((peer, fragment, round_))
