"""The lab: what measures us, proves a claim or plans an experiment.

    python -m tests.lab              # a line for each experiment
    python -m tests.lab NAME ARGS    # runs one; NAME --help shows its options

An experiment is a module of this folder whose docstring shows that command. It uses the product, is
linted with it, and gates nothing. `make lab-smoke` runs each of them once, as small as it goes.
"""

import ast
import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent


def experiments() -> dict[str, str]:
    """The first line of each experiment, by name."""
    found = {}
    for path in sorted(_FOLDER.glob("*.py")):
        name = path.stem.replace("_", "-")
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if f"python -m tests.lab {name}" in text:
            found[name] = text.splitlines()[0]
    return found


def main() -> int:
    """Prints the list, or becomes the experiment that is asked for."""
    known = experiments()
    if len(sys.argv) == 1:
        for name, line in known.items():
            print(f"{name:<18} {line}")
        return 0
    name, *arguments = sys.argv[1:]
    if name not in known:
        print(f"no experiment {name!r}; `python -m tests.lab` lists them", file=sys.stderr)
        return 2
    module = f"tests.lab.{name.replace('-', '_')}"
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    sys.exit(main())
