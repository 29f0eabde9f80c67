"""The table of docs/evidence/programs.md: what becomes of which program, by the tests that hold it.

python -m tests.support.programs_table        writes it anew
"""

import importlib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TESTS = (_ROOT / "tests/integration/programs", _ROOT / "tests/unit/worker/library")
PAGE = _ROOT / "docs/evidence/programs.md"
_BEGIN, _END = "<!-- programs: begin -->\n", "<!-- programs: end -->"


def table() -> str:
    """Markdown: a line for each mark of a test, in the order of files and tests."""
    lines = ["| program | | how |", "| --- | --- | --- |"]
    for path in sorted((path for folder in _TESTS for path in folder.glob("test_*.py")), key=_kind):
        module = importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))
        for test in vars(module).values():
            if getattr(test, "__module__", None) == module.__name__:
                rows = getattr(test, "rows", ())
                lines += [
                    f"| {_capital(row.program)} | {row.happens} | {row.how} |" for row in rows
                ]
    return "\n".join(lines) + "\n"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _kind(path: Path) -> tuple[str, str]:
    """Tests of one kind lie together, wherever they are."""
    return path.name, str(path)


def parts(page: str) -> tuple[str, str, str]:
    """Parts a page: before the table, the table, after it."""
    before, _, rest = page.partition(_BEGIN)
    held, _, after = rest.partition(_END)
    return before + _BEGIN, held, _END + after


def main() -> None:
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(before + table() + after)


if __name__ == "__main__":
    main()
