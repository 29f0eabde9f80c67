"""What cutting a model into stages costs in validation loss, at equal tokens.

    python tests/bench/stage_losses.py [--steps 400] [--preset NAME ...]

4 stages x 2 replicas train beside 2 workers with the whole model: both learn from two streams of
samples, as many batches an inner step from each, and exchange by the same preset. Activations
travel in bf16.
"""

import argparse
import tempfile
from pathlib import Path

from tests.support.swarm_runs import run_swarm, worker_results

PRESETS = ("diloco", "streaming", "noloco")
STAGES, MICROBATCHES, BATCH = 4, 2, 4
MODEL = f"task.architecture={{num_hidden_layers={STAGES}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--preset", nargs="*", choices=PRESETS, default=PRESETS)
    options = parser.parse_args()
    print("| preset | whole | in stages | stages against whole | sent within a stage |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for preset in options.preset:
        steps = ["--steps", str(options.steps), "--inner-steps", str(options.inner_steps)]
        common = ["--preset", preset, "--set", MODEL, *steps]
        batch = f"task.batch_size={MICROBATCHES * BATCH}"
        whole = run_swarm("--workers", "2", "--set", batch, *common)["val_loss"]
        cut = ["--stages", str(STAGES), "--replicas", "2"]
        cut += ["--set", f"stages.microbatches={MICROBATCHES}"]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            batch = f"task.batch_size={BATCH}"
            staged = run_swarm(*cut, "--set", batch, *common, out=out)["val_loss"]
            sent = max(result["exchange_bytes_sent"] for result in worker_results(out))
        print(
            f"| {preset} | {whole:.4f} | {staged:.4f} | {100 * (staged / whole - 1):+.1f} % | "
            f"{sent / 1e6:.2f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
