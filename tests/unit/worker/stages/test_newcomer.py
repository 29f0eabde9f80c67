"""The stage that a newcomer serves, from the members of a status document."""

from worker.stages.newcomer import least_served


def member(stage: object, health: str = "alive") -> dict[str, object]:
    return {"stage": stage, "health": health}


def test_the_stage_with_the_fewest_live_replicas_and_the_first_of_equals() -> None:
    assert least_served([member(0), member(0), member(1), member(2), member(2)], 3) == 1
    assert least_served([member(0), member(1), member(2)], 3) == 0
    assert least_served([], 3) == 0


def test_only_who_is_there_counts() -> None:
    members = [member(0), member(1, "suspect"), member(2, "dead"), member(2, "left")]
    assert least_served(members, 3) == 2


def test_what_is_no_member_of_a_stage_is_passed_over() -> None:
    odd = [member(0), "x", member(None), member("1"), member(7), member(-1), {"stage": 1}]
    assert least_served(odd, 2) == 1
