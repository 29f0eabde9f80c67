"""What cutting a model into stages costs in validation loss, at equal tokens.

    python -m tests.lab stage-losses [--steps 400] [--preset NAME ...]

4 stages x 2 replicas train beside 2 workers with the whole model: both learn from two streams of
samples, as many batches an inner step from each, and exchange by the same preset. Activations
travel in bf16. Exits with 1 where a staged model's loss is more than 3 % above the whole one's.
"""

import argparse
import tempfile
from pathlib import Path

from tests.support.swarm_runs import run_swarm, worker_results

PRESETS = ("diloco", "streaming", "noloco")
STAGES, MICROBATCHES, BATCH = 4, 2, 4
ABOVE = 0.03  # of the whole model's loss
MODEL = f"task.architecture={{num_hidden_layers={STAGES}}}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--preset", nargs="*", choices=PRESETS, default=PRESETS)
    options = parser.parse_args()
    print("| preset | whole | in stages | stages against whole | sent within a stage |")
    print("| --- | ---: | ---: | ---: | ---: |")
    good = True
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
        good &= staged <= (1 + ABOVE) * whole
        print(
            f"| {preset} | {whole:.3f} | {staged:.3f} | {100 * (staged / whole - 1):+.1f} % | "
            f"{sent / 1e6:.2f} MB |",
            flush=True,
        )
    print(f"\nwanted: in stages at most {100 * ABOVE:g} % above whole: {'yes' if good else 'no'}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
