"""Generates the gRPC code beside the .proto files; `--check` only says whether it is fresh."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> list[Path]:
    """Runs protoc into `out` and returns the generated files. It is given the path below
    `murmuration/`: the generated code imports what it names."""
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    sources = sorted(path.relative_to(ROOT) for path in ROOT.glob("murmuration/protos/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    command += [*(f"--{kind}_out={out}" for kind in kinds), *map(str, sources)]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    return sorted((out / "murmuration/protos").glob("*_pb2*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        stale = [
            path.name
            for path in generate(Path(folder))
            if not (committed := ROOT / "protos" / path.name).exists()
            or committed.read_bytes() != path.read_bytes()
        ]
    if stale:
        print(f"protos: {', '.join(stale)} differ from the .proto files; run `make proto`")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
