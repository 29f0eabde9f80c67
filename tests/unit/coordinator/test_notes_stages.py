"""What is said of stages that lose their replicas, move and are made anew."""

from coordinator.report.notes import Notes


def test_a_move_and_a_stage_made_anew_have_lines() -> None:
    notes = Notes()
    assert notes.line({"event": "moves", "peer": "w5", "stage": 2, "to": 1}) == (
        "w5 moves from stage 2 to 1"
    )
    rebuilt = {"event": "rebuilt", "peer": "w5", "stage": 1, "from": {"0": 0.25, "2": 0.75}}
    assert notes.line(rebuilt) == (
        "w5 has made stage 1 anew, from 25 % of stage 0 and 75 % of stage 2"
    )


def test_what_is_missing_or_strange_is_left_open() -> None:
    notes = Notes()
    assert notes.line({"event": "moves", "peer": "w5", "to": "\x1b"}) == (
        "w5 moves from stage ? to ?"
    )
    odd = {"event": "rebuilt", "peer": "w5", "stage": 1, "from": {"\x1b": 1.0, "2": "x"}}
    assert notes.line(odd) == (
        "w5 has made stage 1 anew, from 100 % of stage \N{REPLACEMENT CHARACTER}"
    )
    assert notes.line({"event": "rebuilt", "peer": "w5", "from": 3}) == (
        "w5 has made stage ? anew, from nothing"
    )


def test_a_stage_without_replicas_is_said_once_until_somebody_says_it_again() -> None:
    notes = Notes()

    def warned(peer: str, **fields: object) -> str | None:
        return notes.line({"event": "warning", "peer": peer, "text": "gone", **fields})

    assert warned("w0", stage=2) == "w0 warning: gone"
    assert warned("w1", stage=2) is None
    assert warned("w1", stage=2) == "w1 warning: gone"
    assert warned("w0", stage=2) is None
    assert [warned("w0"), warned("w1")] == ["w0 warning: gone", "w1 warning: gone"]
