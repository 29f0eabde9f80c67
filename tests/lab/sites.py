"""Two sites of several ranks beside two processes: every preset, FSDP2, HSDP, with TP, and DDP.

    python -m tests.lab sites [--presets onebit noloco]

Real processes on the CPU with Gloo. For each it prints a Markdown row: how far the final parameters
of a site are from those of a process, and whether both sites end with the same bits.
"""

import argparse

from murmuration.algorithms.plan import PRESETS
from tests.support.site_loop import two_sites

SITES = {"fsdp": (2, 4), "hsdp": (4,), "tp": (4,), "ddp": (2,)}
OTHERS = ("ddp", "kseed", "local")  # of one process, of tasks, of nothing to exchange


def main() -> None:
    """Prints a row for each preset and kind of site."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    presets = [name for name in PRESETS if name not in OTHERS]
    parser.add_argument("--presets", nargs="+", choices=presets, default=presets)
    print(
        "| preset | site | ranks | farthest from a process | same bits |\n|---|---|---:|---:|---|"
    )
    for preset in parser.parse_args().presets:
        processes = two_sites(preset)
        for kind, ranks in ((kind, ranks) for kind, many in SITES.items() for ranks in many):
            sites = two_sites(preset, kind, ranks)
            far = max(abs(a - b) for a, b in zip(sites[0], processes[0], strict=True))
            alike = "yes" if sites[0] == sites[1] else "no"
            print(f"| {preset} | {kind} | {ranks} | {far:.1e} | {alike} |", flush=True)


if __name__ == "__main__":
    main()
