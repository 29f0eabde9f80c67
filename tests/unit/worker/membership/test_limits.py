"""What can be believed of a member of a run."""

from typing import Any

import pytest

from murmuration.worker.membership import Digest, Member, MemberLimits

NOW_MS = 1_700_000_000_000
LIMITS = MemberLimits(steps=100, fragments=3, stages=4, stage=1)
DIGESTS = (Digest(7, 2, 5),) * 3


def problem(**changes: Any) -> str | None:
    said = {"epoch": NOW_MS, "stage": 1, "digests": DIGESTS, **changes}
    return LIMITS.problem(Member("w1", "host:1", **said))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"digests": ()},  # it has no model yet
        {"step": 100, "heartbeat": 2**40, "incarnation": 2**20},
        {"digests": (Digest(102, 2, 5),) * 3},  # with the means at the end
        {"epoch": 2 * NOW_MS},  # by a clock that is decades ahead
        {"stage": 3, "digests": DIGESTS * 2},  # another stage has other fragments
    ],
)
def test_what_a_peer_can_say(changes: dict[str, Any]) -> None:
    assert problem(**changes) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epoch": 2**64 - 1}, "epoch 18446744073709551615, at most"),
        ({"incarnation": 2**32 - 1}, "incarnation"),
        ({"heartbeat": 2**63}, "heartbeat"),
        ({"step": 101}, "step 101 of 100"),
        ({"stage": 4}, "stage 4 of 4"),
        ({"digests": DIGESTS[:2]}, "2 fragments, of 3"),
        ({"stage": 2, "digests": DIGESTS * 400}, "1200 fragments"),
        ({"digests": (Digest(1007, 2, 5),) * 3}, "version 1007 in a run of 100 steps"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], says: str) -> None:
    assert says in str(problem(**changes))
