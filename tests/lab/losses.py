"""What pairs cost in validation loss beside a mean over all, at equal tokens.

    python -m tests.lab losses [--steps 1600] [--workers 4] [--seed 0] [--head-start-after 0]
        [--only NAME ...]

Every variant trains the built-in task as `--workers` workers would, by
`tests.support.specification` with the gradients of all in one pass. Several run at once, a core
each. Bytes are those of the encoded contributions and reductions, or anchors, that a worker sends,
before zstd. With pairs the loss is the mean over the replicas; beside it that of the mean of their
anchors, which a consensus pass would end with, and the spread: how far a replica is from that mean,
relative to its size. Writes a Markdown table.

A preset of pairs is set beside `diloco` with the same H where both were asked for; exits with 1
when the mean anchor costs it more than 3 %.
"""

import argparse
import multiprocessing
import statistics
from dataclasses import dataclass

import torch

from murmuration.algorithms.diloco import mean_in_order
from murmuration.algorithms.noloco import relative_distance
from murmuration.algorithms.presets import PRESETS
from tests.lab.one_process import Training, train

TARGET = 0.03
OF_PAIRS = {  # what each is to be compared with
    "noloco, H 20, fp32": "diloco, H 20, fp32",
    "streaming-noloco, H 50, e3m0": "diloco, H 50, fp32",
}
OWN_MOMENTUM = ("shared_momentum=false", "outer_momentum=0.5", "outer_pull=0.7")  # the paper's
VARIANTS: dict[str, tuple[str, ...]] = {
    "diloco, H 20, fp32": ("diloco",),
    "noloco, H 20, fp32": ("noloco",),
    "noloco, H 20, fp32, momentum of its own": ("noloco", *OWN_MOMENTUM, "outer_lr=0.7"),
    "diloco, H 50, fp32": ("diloco", "inner_steps=50"),
    "streaming-noloco, H 50, e3m0": ("streaming-noloco",),
    "streaming-noloco, H 50, e3m0, momentum of its own": (
        "streaming-noloco", *OWN_MOMENTUM, "outer_lr=1.1", "merge_alpha=0.5",
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=VARIANTS, help="one of the variants")
    parser.add_argument(
        "--head-start-after",
        type=int,
        default=0,
        metavar="STEPS",
        help="with pairs: inner steps until the anchors of the next round's group are here",
    )
    options = parser.parse_args()
    asked = [
        Asked(name, options.steps, options.workers, options.seed, options.head_start_after)
        for name in options.only or VARIANTS
    ]
    print(
        f"{options.workers} workers, {options.steps} steps, seed {options.seed}\n\n"
        "| variant | validation loss | sent per worker and step | bits | spread | "
        "loss of the mean anchor |\n| --- | --- | --- | --- | --- | --- |"
    )
    found: dict[str, Result] = {}
    with multiprocessing.get_context("spawn").Pool() as pool:
        for each, result in zip(asked, pool.imap(measure, asked), strict=True):
            found[each.name] = result
            print(f"| {each.name} | {result.row} |", flush=True)
    print()
    within = True
    for name, other in OF_PAIRS.items():
        if not (name in found and other in found):
            continue
        beside = found[other]
        loss, middle = (each / beside.loss - 1 for each in (found[name].loss, found[name].middle))
        within &= middle <= TARGET
        print(
            f"{name}: {100 * loss:+.1f} % beside diloco, {100 * middle:+.1f} % after a consensus "
            f"pass; wanted: at most {100 * TARGET:g} %"
        )
    return 0 if within else 1


@dataclass(frozen=True)
class Asked:
    """One variant to train."""

    name: str
    steps: int
    workers: int
    seed: int
    head_start_after: int

    def head_start(self, peer: str, fragment: int, round_: int, applied_at: int) -> int:
        """As `specification.train` asks for it."""
        return applied_at + self.head_start_after


@dataclass(frozen=True)
class Result:
    """One variant's. Args: loss: mean over the replicas; middle: that of their mean anchor; row: as
    printed."""

    loss: float
    middle: float
    row: str


def measure(asked: Asked) -> Result:
    """Trains one variant."""
    preset, *changes = VARIANTS[asked.name]
    settings = [f"diloco.{each}" for each in changes]
    if PRESETS[preset].exchange == "pairs":
        settings.append("diloco.consensus=false")  # which the mean anchor stands for
    training = Training(
        preset=preset,
        settings=tuple(settings),
        steps=asked.steps,
        workers=asked.workers,
        seed=asked.seed,
        batched="yes",
    )
    trained = train(training, asked.head_start)
    sent, loss_of = trained.sent, trained.loss_of
    row = f"{sent.bytes / asked.steps / 1e3:.1f} kB | {8 * sent.bytes / sent.values:.2f}"
    held = {peer: trained.anchors(peer) for peer in trained.outer}
    if trained.plan.exchange != "pairs":
        loss = loss_of(held["w0"])
        return Result(loss, loss, f"{loss:.3f} | {row} | - | -")
    middle = [mean_in_order(anchors) for anchors in zip(*held.values(), strict=True)]
    spread = statistics.mean(
        relative_distance(torch.cat(anchors), torch.cat(middle)) for anchors in held.values()
    )
    loss = statistics.mean(loss_of(anchors) for anchors in held.values())
    at_middle = loss_of(middle)
    row = f"{loss:.3f} | {row} | {100 * spread:.2f} % | {at_middle:.3f}"
    return Result(loss, at_middle, row)


if __name__ == "__main__":
    raise SystemExit(main())
