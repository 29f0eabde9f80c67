"""Bytes that a link carries of a preset, beside what the plan says.

    python -m tests.lab traffic --preset onebit --preset sparse [--link 2mbit] [--steps 600]

Four workers train a model of 2.4 million parameters behind links. What the link carries of each,
gossip and all else included, stands beside what the plan says, with the exact mean that ends a run
of `keep`. Fails above 3 %, or where a worker computes less than 98 % of the time. zstd is off,
since the plan knows nothing of it. Steps take a pause, so that the workers do not slow each other
down; what takes long in a run of few steps is its end.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from murmuration.worker.config import Config, load_config
from murmuration.worker.tasks import load_task
from murmuration.worker.training.model import schema_of
from tests.lab.one_process import last_mean_bytes, sent
from tests.support.shaped import relayed_swarm
from tests.support.workers import settings_of

WORKERS, NEAR, COMPUTING = 4, 0.03, 0.98
WIDE = (
    "{hidden_size=256, intermediate_size=640, num_hidden_layers=3, num_attention_heads=4, "
    "num_key_value_heads=4}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", dest="presets", action="append", required=True)
    parser.add_argument("--link", default="2mbit")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause-s", type=float, default=0.3)
    options = parser.parse_args()
    return beside_the_plan(options.presets, options.link, options.steps, options.pause_s)


def beside_the_plan(presets: Sequence[str], link: str, steps: int, pause_s: float) -> int:
    """Prints a row for each preset; 1 where one misses what is wanted."""
    print(
        f"{WORKERS} workers, {steps} steps, {link}\n\n"
        "| preset | sent a step, as planned | over the link | computing |\n"
        "| --- | ---: | ---: | ---: |",
        flush=True,
    )
    good = True
    for preset in presets:
        settings = settings_of(
            run__steps=steps,
            exchange__compression="never",
            task__name="tests.support.slow_task:SlowBytes",
            task__pause_s=pause_s,
            task__architecture=WIDE,
        )
        config = load_config(None, settings[1::2], preset)
        planned = planned_bytes(config, steps) / steps
        with tempfile.TemporaryDirectory() as folder:
            words = ("--preset", preset, *settings)
            with relayed_swarm(WORKERS, Path(folder), link, words) as (swarm, relay):
                results = swarm.wait(patience_s=3600)
                counted = relay.counters()
        ratios = [counted[name].sent_bytes / steps / planned for name in results]
        apart = max((ratio - 1 for ratio in ratios), key=abs)
        computing = min(float(each["compute_utilization"]) for each in results.values())
        good &= abs(apart) <= NEAR and computing >= COMPUTING
        print(
            f"| `{preset}` | {planned / 1e3:.2f} kB | {100 * apart:+.1f} % "
            f"| {100 * computing:.1f} % |",
            flush=True,
        )
    wanted = f"at most {100 * NEAR:.0f} % from the plan, computing at least {100 * COMPUTING:.0f} %"
    print(f"\n{wanted}: {'kept' if good else 'MISSED'}")
    return 0 if good else 1


def planned_bytes(config: Config, steps: int) -> float:
    """What each worker sends in the whole run, the exact mean at its end included."""
    task = load_task(config.task.name, seed=0, options=config.task.options)
    fragments = config.plan.cut(schema_of(task.model()))
    elements = sum(fragment.elements for fragment in fragments)
    rounds = sent(config.plan, fragments, steps, WORKERS).bytes
    return rounds + last_mean_bytes(config.plan, elements, WORKERS)


if __name__ == "__main__":
    raise SystemExit(main())
