"""Spoiled messages for as long as is asked: what was executed, what broke, how memory grew.

    python -m tests.lab fuzz [--seconds 20] [--seed 0] [--only NAME]

One line a target: a live swarm on the virtual clock, or a reader of bytes. A crash is any exception
but those that are documented; its seed is printed. Exit code 1 if there was one.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.protocol.virtual_time import run
from tests.support.fuzz import SWARMS, spoiled, swarm_under_fire
from tests.support.fuzz_readers import READERS, Reader

_AT_ONCE = 300  # requests to one swarm, before the next begins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--only", default="", help="targets whose name holds this")
    options = parser.parse_args()
    targets: dict[str, Callable[[int], tuple[int, list[str]]]] = {
        **{f"swarm: {kind}": lambda seed, kind=kind: _fire(kind, seed) for kind in SWARMS},
        **{
            name: lambda seed, reader=reader: _read(reader, seed)
            for name, reader in READERS.items()
        },
    }
    print(f"{'target':28} {'executions':>10} {'crashes':>8} {'MiB':>11}", flush=True)
    crashed = 0
    for name, target in targets.items():
        if options.only not in name:
            continue
        target(options.seed)  # what is loaded once is no growth
        before, executions, crashes, seed = _resident_mib(), 0, 0, options.seed
        ends = time.monotonic() + options.seconds
        while time.monotonic() < ends:
            seed += 1
            done, problems = target(seed)
            executions, crashes = executions + done, crashes + len(problems)
            for problem in problems:
                print(f"  seed {seed}: {problem}", flush=True)
        crashed += crashes
        memory = f"{before:.0f} -> {_resident_mib():.0f}"
        print(f"{name:28} {executions:>10,} {crashes:>8} {memory:>11}", flush=True)
    return 1 if crashed else 0


def _fire(kind: str, seed: int) -> tuple[int, list[str]]:
    try:
        fuzz = run(swarm_under_fire(kind, random.Random(seed), _AT_ONCE))
    except Exception as error:  # rounds do not go on, or a task has failed
        return _AT_ONCE, [repr(error)]
    return fuzz.executions.total(), fuzz.defects


def _read(reader: Reader, seed: int) -> tuple[int, list[str]]:
    rng, problems = random.Random(seed), []
    for _ in range(100):
        try:
            reader.read(spoiled(rng, reader.samples, reader.kind))
        except reader.errors:
            pass
        except Exception as error:
            problems.append(repr(error))
    return 100, problems


def _resident_mib() -> float:
    gc.collect()
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    ]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    raise SystemExit(main())
