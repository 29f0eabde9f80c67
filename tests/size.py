"""How large the house is, beside the budget that pyproject.toml sets: files and lines by package.

    python -m tests.size

counts what git tracks, generated code apart, and fails where a package is above its budget.
A budget goes down with each clean-up; a rise is a commit of its own, which says what for.
"""

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).resolve().parents[1]
_GENERATED = "_pb2"
_LAB = "tests/lab"


def counted(paths: Iterable[Path]) -> tuple[Counter[str], Counter[str]]:
    """(files, lines) of Python by top-level folder; the lab is one of its own."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in paths:
        top, *below = path.relative_to(_ROOT).parts
        top = _LAB if (top, *below[:1]) == ("tests", "lab") else top
        if path.suffix == ".py" and _GENERATED not in path.name:
            files[top] += 1
            lines[top] += len(path.read_text().splitlines())
    return files, lines


def main() -> int:
    """Prints a line for each package; returns 1 where one is above its budget."""
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    budget: dict[str, list[int]] = settings["tool"]["size"]
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    files, lines = counted(
        path for line in tracked.stdout.split() if (path := _ROOT / line).exists()
    )
    table, above = Table("package", "files", "of", "lines", "of", box=None), []
    for package, (most_files, most_lines) in budget.items():
        of = (files[package], most_files, lines[package], most_lines)
        table.add_row(package, *(f"{number:,}" for number in of))
        if files[package] > most_files or lines[package] > most_lines:
            above.append(package)
    Console().print(table)
    if above:
        print(
            f"above the budget of [tool.size] in pyproject.toml: {', '.join(above)}; make "
            "something unnecessary, or raise it in a commit of its own that says what for"
        )
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
