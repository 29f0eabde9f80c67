"""Tables as text."""

from murmuration.worker.views.table import text_table

ROWS = [["w0", "3 MB", "done"], ["worker-1", "33 MB", "a|b"]]


def test_columns_stand_in_line_below_their_heads() -> None:
    shown = text_table(["worker", "sent", "end"], ROWS, align="<><", title="what they did")
    assert shown.splitlines() == [
        "what they did",
        "",
        "  worker      sent   end",
        " ─────────────────────────",
        "  w0          3 MB   done",
        "  worker-1   33 MB   a|b",
    ]
    assert shown.endswith("\n")


def test_long_heads_are_broken_and_stand_on_the_rule() -> None:
    lines = text_table(["", "wall time of a run"], [["w0", "3 s"]], head_width=9).splitlines()
    assert lines[1:3] == ["       wall time", "        of a run"]


def test_a_table_without_rows_is_its_heads() -> None:
    assert text_table(["a", "b"], []).splitlines()[1:] == ["  a   b", " ───────"]
