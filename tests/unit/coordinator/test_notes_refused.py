"""What is said of shards and parts that came and did not fit."""

from coordinator.report.notes import Notes

BROKE = "shard 3 of round 5 of fragment 0 from w1 broke off"


def test_a_link_that_breaks_often_has_one_line_for_each_sender_and_round() -> None:
    notes = Notes()
    event = {"event": "refused", "peer": "w0", "reason": BROKE, "again": True}
    event |= {"sender": "w1", "round": 5}
    assert notes.line(event) == f"w0 asks for it again: {BROKE}"
    assert notes.line(event | {"reason": "another shard"}) is None
    for other in ({"round": 6}, {"sender": "w2"}, {"peer": "w3"}):
        assert notes.line(event | other) is not None


def test_what_does_not_fit_is_refused() -> None:
    event = {"event": "refused", "peer": "w0", "reason": "part 7", "again": False}
    assert Notes().line(event) == "w0 refused: part 7"
