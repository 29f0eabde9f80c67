"""Presets, PyTorch's DDP, torchft and hivemind on links of several speeds: loss, time, bytes.

    python -m tests.lab bench [--link 20mbit ...] [--preset NAME ...] [--peers NAME ...]
        [--steps 400] [--limit 300] [--out FOLDER]
    make bench ARGS="..."    # the same

Each trains the same model on the same samples, on processes of one torch thread each. `local` comes
first on each link, and all are held against it. A run that would take longer than `--limit` seconds
is cut to fewer rounds: its times have a `~`, and it has no loss. Ctrl-C prints what was measured.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from murmuration.algorithms.link import Link, parse_link
from murmuration.algorithms.utilization import predict
from murmuration.coordinator.launch import Launch
from murmuration.coordinator.supervisor import run_swarm
from murmuration.protos.exit_codes import MurmurError
from murmuration.protos.figures import count, optional, percent, seconds, size
from murmuration.worker.cli.plan_report import run_workload
from murmuration.worker.config import load_config
from tests.lab.bench_peers import run_peers
from tests.lab.placed import PLACES
from tests.support.namespaces import Namespaces, why_not

LOCAL = "local"
SYSTEMS = {"torch-ddp": "ddp", "torchft": "diloco", "hivemind": "diloco"}  # by the preset alike
LINKS = ("2mbit", "20mbit", "100mbit", "1000mbit")
PRESETS = ("ddp", "diloco", "streaming")
no_namespaces = cache(why_not)
HEADS = (
    "speed beside local", "wall time", "compute utilization", "stall per round",
    "sent per worker and step", "bits per parameter", "validation loss", "note",
)  # fmt: skip
_PEERS_PYTHON = Path(".venv-peers/bin/python")
_THEIRS_TOO = ("task.", "inner.", "run.")  # settings that other systems would have to share
_LEAST_ROUNDS, _LEAST_STEPS = 4, 20
_START_S = 240.0
_PORT = 7700  # the same for each, since each has an address of its own

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Args: asked_steps: of the whole run, of which the report may be a shorter one;
    report: None where there is none, and the problem says why."""

    link: str
    name: str
    asked_steps: int
    report: Report | None = None
    problem: str = ""

    @property
    def figures(self) -> Report:
        """Means over the workers; None is what was not measured. Times are of all asked steps, in
        seconds; the mean that ends a run, which comes after the last step, is in none of them."""
        told = self.report or {}
        steps, rounds = told.get("steps"), told.get("rounds_completed") or 0
        rounds -= told.get("final_mean_rounds") or 0
        if not steps or not told.get("wall_s"):
            return {}
        stall_s = (told.get("stall_s") or 0.0) - (told.get("final_mean_stall_s") or 0.0)
        sent_bytes = told["bytes_sent_per_worker"]
        if "namespaces" in (told.get("link_means") or ""):  # whole Ethernet frames
            counted = told["link_bytes"].values()
            sent_bytes = sum(each["sent_bytes"] for each in counted) / len(counted)
        return {
            "steps": steps,
            "whole": steps == self.asked_steps,
            "wall_s": told["wall_s"] * self.asked_steps / steps,
            "steps_per_s": steps / told["wall_s"],
            "compute_utilization": told["compute_s"] / told["wall_s"],
            "stall_per_round_s": stall_s / rounds if rounds else None,
            "sent_per_step_bytes": sent_bytes / steps if rounds else None,
            "bits_per_parameter": bits_of(told.get("bits_per_value") or {}),
            "val_loss": told["val_loss"] if steps == self.asked_steps else None,
        }

    @property
    def notes(self) -> list[str]:
        """The notes that the figures need, or why there are none."""
        told, figures = self.report or {}, self.figures
        notes = [self.problem] if self.problem else []
        if figures and not figures["whole"]:
            notes.append(f"{figures['steps']:,} of {count(self.asked_steps, 'step')}")
        if partial := told.get("rounds_partial"):
            notes.append(f"{count(partial, 'round')} averaged without everybody's part")
        if failed := told.get("rounds_failed"):
            notes.append(f"{count(failed, 'failed round')}, over all workers")
        if lost := sum(bool(peer.get("exit_code")) for peer in told.get("peers") or ()):
            notes.append(f"{count(lost, 'worker')} did not come to the end")
        # Systems that average to rounding differ by rounding; only a difference that shows counts.
        apart = told.get("val_loss_spread")
        if told.get("hashes_agree") is False and self.name != LOCAL and (apart or 1.0) > 1e-3:
            notes.append("replicas differ")
        return notes

    def cells(self, local: Report) -> list[str]:
        """A cell for the name, and for each head. Args: local: the figures of that on this link."""
        found = self.figures
        about = "" if found.get("whole", True) else "~"
        speed = None
        if found and local:
            speed = found["steps_per_s"] / local["steps_per_s"]
        return [
            (self.report or {}).get("system") or f"`{self.name}`",
            optional(speed, lambda share: about + percent(share, 0 if share > 0.0995 else 2)),
            optional(found.get("wall_s"), lambda value: about + seconds(value)),
            optional(found.get("compute_utilization"), lambda value: about + percent(value, 1)),
            optional(found.get("stall_per_round_s"), seconds),
            optional(found.get("sent_per_step_bytes"), size),
            optional(found.get("bits_per_parameter"), lambda value: f"{value:.2f}"),
            optional(found.get("val_loss"), lambda value: f"{value:.3f}"),
            "; ".join(self.notes),
        ]


def bits_of(bits_per_value: Mapping[str, Any]) -> float | None:
    """The bits a value of what rounds send both ways, weighted by the values that each carried."""
    bits = values = 0.0
    for kind, part in bits_per_value.items():
        if kind != "final_mean" and part and part.get("bits_travelled"):
            bits += 8 * part["payload_bytes"]
            values += 8 * part["payload_bytes"] / part["bits_travelled"]
    return bits / values if values else None


def tables(rows: Sequence[Row]) -> str:
    """One for each link, in Markdown."""
    blocks = []
    for link in dict.fromkeys(row.link for row in rows):
        here = [row for row in rows if row.link == link]
        local = next((row.figures for row in here if row.name == LOCAL), {})
        lines = [[link, *HEADS], ["---", *["---:"] * (len(HEADS) - 1), "---"]]
        lines += [row.cells(local) for row in here]
        blocks.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(blocks)


# ------------------------------------------------------------------------------------- the runs


class Bench:
    """The runs of a comparison. Args: options: as typed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []

    def run(self) -> None:
        """Adds a row for each preset and system on each link. Raises KeyboardInterrupt."""
        for text in self.options.links:
            step_s = None
            for name in (LOCAL, *self.options.presets, *self.options.systems):
                asked = self.options.steps
                row = Row(link=text, name=name, asked_steps=asked)
                steps = asked if name == LOCAL else self._steps(name, parse_link(text), step_s)
                print(f"{text}  {name}: {steps} of {count(asked, 'step')}", file=sys.stderr)
                try:
                    report = self._report(name, text, steps)
                except (MurmurError, OSError) as error:
                    self.rows.append(replace(row, problem=" ".join(str(error).split())))
                    continue
                self.rows.append(replace(row, report=report))
                if name == LOCAL:
                    step_s = report["wall_s"] / report["steps"]

    def _steps(self, name: str, link: Link, step_s: float | None) -> int:
        """All that were asked for where they fit into the limit; else as many whole rounds as do.

        Args: step_s: of `local`; None where that failed."""
        options, preset = self.options, SYSTEMS.get(name, name)
        config = load_config(None, self._settings(preset), preset)
        period, asked = config.plan.inner_steps, options.steps
        if name in SYSTEMS:
            asked -= asked % period
        if step_s is None:
            return asked
        workload = run_workload(config, step_s, threads=1)
        period_s = predict(config.plan, workload, link, options.workers).period_s
        rounds = max(_LEAST_ROUNDS, _LEAST_STEPS // period, int(options.limit / period_s))
        return min(asked, rounds * period)

    def _settings(self, preset: str) -> list[str]:
        """As `--set` takes them. A gradient is exchanged in every step."""
        inner_steps = None if preset in (LOCAL, "ddp") else self.options.inner_steps
        chosen = [f"diloco.inner_steps={inner_steps}"] if inner_steps else []
        return [*chosen, *self.options.settings]

    def _report(self, name: str, text: str, steps: int) -> Report:
        """Raises MurmurError, OSError: there is none; KeyboardInterrupt."""
        link = parse_link(text)
        plain = text.replace(" ", "").replace(",", "-").replace("=", "-")
        folder = self.options.out / plain / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        if name in SYSTEMS:
            return self._theirs(name, link, steps, folder)
        launch = Launch(
            workers=self.options.workers,
            out=folder,
            preset=name,
            steps=steps,
            seed=self.options.seed,
            settings=tuple(self._settings(name)),
            threads=1,
            links=(text,),
        )
        rate_only = not (link.delay_s or link.jitter_s or link.loss)
        if rate_only and no_namespaces() is None:
            return placed(launch, link)
        return {**trained(launch), "link_means": "relay"}

    def _theirs(self, name: str, link: Link, steps: int, folder: Path) -> Report:
        setting = next((each for each in self.options.settings if each.startswith(_THEIRS_TOO)), "")
        for problem, holds in (
            ("not installed (make .venv-peers/.ready)",
             name != "torch-ddp" and not _PEERS_PYTHON.exists()),
            (f"skipped: it trains the built-in defaults, not {setting}", bool(setting)),
            ("skipped: its links have a rate and nothing else",
             bool(link.delay_s or link.jitter_s or link.loss)),
            (f"skipped: {self.options.steps} steps are less than a round", steps == 0),
            (f"skipped: no network namespaces: {no_namespaces()}", no_namespaces() is not None),
        ):  # fmt: skip
            if holds:
                raise MurmurError(problem, 1)
        preset = SYSTEMS[name]
        inner = load_config(None, self._settings(preset), preset).plan.inner_steps
        folder.mkdir()
        settings = {"steps": steps, "inner_steps": inner, "seed": self.options.seed}
        patience_s = _START_S + 3 * self.options.limit
        try:
            return run_peers(
                name, link, folder, patience_s, workers=self.options.workers, **settings
            )
        except AssertionError as error:
            raise MurmurError(f"failed: {str(error).splitlines()[0]}, see {folder}", 1) from error


def trained(launch: Launch) -> Report:
    """The report of a swarm. Main thread only. Raises MurmurError, KeyboardInterrupt."""
    log = launch.out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        try:
            code, report = run_swarm(launch, Console(file=file, width=160, highlight=False))
        except MurmurError as failure:
            if failure.exit_code > 128:
                raise KeyboardInterrupt from failure
            raise
    if code > 128:
        raise KeyboardInterrupt
    if code:
        raise MurmurError(f"no worker came to the end; see {log}", code)
    return report


def placed(launch: Launch, link: Link) -> Report:
    """The same with each worker in a network namespace behind its link. Raises as `trained`."""
    with Namespaces(launch.workers, link) as network:
        places = {
            name: [f"{member.address}:{_PORT}", *member.prefix]
            for name, member in zip(launch.names, network.members, strict=True)
        }
        os.environ[PLACES] = json.dumps(places)
        program = (sys.executable, "-m", "tests.lab.placed", *launch.program)
        report = trained(replace(launch, links=(), program=program))
        link_bytes = dict(zip(launch.names, network.counters(), strict=True))
    return {**report, "link_means": "namespaces", "link_bytes": link_bytes}


def main() -> int:
    """Prints the tables; 1 where a run has failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", dest="links", action="append", metavar="20mbit[,delay=50ms]")
    parser.add_argument("--preset", dest="presets", action="append")
    parser.add_argument("--peers", action="append", choices=("none", *SYSTEMS), help="all")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--inner-steps", type=int, help="of all; else each preset's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--limit", type=float, default=300.0, help="of a run, in seconds")
    parser.add_argument("--out", type=Path, default=f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    options.links = options.links or LINKS
    options.presets = [each for each in options.presets or PRESETS if each != LOCAL]
    options.systems = [] if "none" in (options.peers or ()) else options.peers or [*SYSTEMS]
    options.out = Path(options.out)
    options.out.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads are not all that is counted in it
    bench, code = Bench(options), 0
    try:
        bench.run()
    except KeyboardInterrupt:
        code = 130
    document = [{**asdict(row), **row.figures} for row in bench.rows]
    (options.out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "bench.md").write_text(tables(bench.rows) + "\n")
    print(tables(bench.rows))
    skipped = ("skipped", "not installed")
    failed = any(row.problem and not row.problem.startswith(skipped) for row in bench.rows)
    return code or int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
