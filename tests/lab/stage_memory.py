"""Memory of a peer that serves a stage, against one that holds the whole model.

    python -m tests.lab stage-memory [--stages 4] [--steps 6] [--preset local]

Trains models of two depths, whole in one process and cut into stages of one replica each. What a
process takes whatever the model (interpreter, libraries, activations of one layer) drops out of the
difference between the depths; that of a stage's peer is compared to the whole's, beside the share
of the parameters that it has. Peaks are those of the last inner step, without evaluation. With the
preset local they are of training alone; others add what a round holds, of the whole model more.

Exits with 1 where a stage's peer has a share of the whole's growth that is above its share of the
parameters by more than 0.03, or has held more in flight than `[stages] memory_mib` allows.
"""

import argparse
import tempfile
from pathlib import Path

from tests.support.swarm_runs import Report, run_swarm, worker_results

DEPTHS = (8, 24)
SIZES = "hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=4"
ABOVE = 0.03  # of the whole's growth: pages and the allocator's own
SMALL = ("task.context_bytes=32", "task.batch_size=1", "stages.microbatches=4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--preset", default="diloco")
    options = parser.parse_args()
    common = ["--preset", options.preset, "--steps", str(options.steps)]
    alone = [run("--workers", "1", *common, depth=depth) for depth in DEPTHS]
    cut = [run("--stages", str(options.stages), *common, depth=depth) for depth in DEPTHS]
    whole = growth(alone[0][0], alone[1][0])
    first = peak(alone[1][0])
    print(
        "| process | peak | grows by | of the whole's | share of the parameters | in flight |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        f"| whole model | {first:.0f} MB | {whole[0] / 1e6:.0f} MB | 1 | 1 | - |"
    )
    good = True
    for shallow, deep in zip(*cut, strict=True):
        grown, params = growth(shallow, deep)
        share, of_params = grown / whole[0], params / whole[1]
        held, limit = deep["in_flight_peak_bytes"], deep["in_flight_limit_bytes"]
        good &= share <= of_params + ABOVE and held <= limit
        print(
            f"| stage {deep['stage']} | {peak(deep):.0f} MB | {grown / 1e6:.0f} MB | "
            f"{share:.2f} | {of_params:.2f} | {held / 1e6:.2f} of {limit / 1e6:.0f} MB |"
        )
    print(
        f"\nwanted: of the whole's growth at most the share of the parameters and {ABOVE:g}, in "
        f"flight at most the limit: {'yes' if good else 'no'}"
    )
    return 0 if good else 1


def run(*args: str, depth: int) -> list[Report]:
    """The workers' results."""
    settings = (f"task.architecture={{num_hidden_layers={depth}, {SIZES}}}", *SMALL)
    flags = [part for each in settings for part in ("--set", each)]
    flags += ["--inner-steps", "3"]
    with tempfile.TemporaryDirectory() as folder:
        run_swarm(*args, *flags, out=Path(folder) / "run")
        return worker_results(Path(folder) / "run")


def growth(shallow: Report, deep: Report) -> tuple[float, float]:
    """(bytes of the peak, parameters) by which the deeper model is larger."""
    grown = deep["peak_rss_bytes"] - shallow["peak_rss_bytes"]
    return grown, deep["params"] - shallow["params"]


def peak(peer: Report) -> float:
    return float(peer["peak_rss_bytes"]) / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
