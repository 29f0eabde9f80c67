"""The presets at equal tokens: validation loss, traffic, utilization. Writes a Markdown table.

    python -m tests.lab baselines [--steps N] [--seeds 0,1] [murmur swarm options]

Every preset trains the same number of inner steps on the same streams of samples; `local` is one
worker alone, so it sees a quarter of the tokens: what a swarm gains is measured against it.
"""

import argparse
from statistics import mean

from tests.support.swarm_runs import Report, run_swarm

PRESETS = ("streaming", "diloco", "ddp", "local")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0")
    options, more = parser.parse_known_args()
    runs: dict[str, list[Report]] = {preset: [] for preset in PRESETS}
    for seed in options.seeds.split(","):
        for preset in PRESETS:
            workers = "1" if preset == "local" else "4"
            report = run_swarm("--preset", preset, "--workers", workers, "--seed", seed, *more)
            runs[preset].append(report)
            print(f"seed {seed} {preset}: validation loss {report['val_loss']:.3f}", flush=True)
    print(table(runs))


def table(runs: dict[str, list[Report]]) -> str:
    """A Markdown table; losses are means over seeds."""
    losses = {preset: mean(report["val_loss"] for report in runs[preset]) for preset in PRESETS}
    gain = losses["local"] - losses["ddp"]
    lines = [
        "| preset | workers | validation loss | share of DDP's gain | sent per worker | "
        "compute utilization | wall |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for preset in PRESETS:
        reports = runs[preset]
        share = (losses["local"] - losses[preset]) / gain if gain else 0.0
        sent = mean(mean(peer["bytes_sent"] for peer in r["peers"]) for r in reports)
        lines.append(
            f"| `{preset}` | {reports[0]['workers']} | {losses[preset]:.3f} | {share:.2f} | "
            f"{sent / 1e6:.1f} MB | {mean(r['compute_utilization'] for r in reports):.2f} | "
            f"{mean(r['wall_s'] for r in reports):.0f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
