"""The options of `murmur swarm`, and the command lines that they become."""

import os
import re
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from murmuration.algorithms.link import Link, parse_link
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.worker.cli.options import RunFlags, option, track_option, web_option

# -P: a folder called worker or protos where the user happens to be is not ours.
WORKER_PROGRAM = (sys.executable, "-P", "-m", "murmuration.worker.cli")
MAX_WORKERS = 64
_NAMED_LINK = re.compile(r"(w\d+)=(.*)", re.DOTALL)


def _cores() -> list[int]:
    """The cores that this process may use; empty where the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else []


@dataclass(frozen=True, kw_only=True)
class Launch(RunFlags):
    """A swarm to start; None leaves a setting to the config or its default. `threads` are each
    worker's: more threads than cores make training several times slower, and no worker knows how
    many share the machine. Tests put a `program` of their own."""

    workers: int = option(
        "--workers", type=int, help="The number of processes, up to 64.  [default: 4]"
    )
    device: str | None = option(
        "--device", metavar="NAME", help="A device: cpu, cuda, ...  [default: auto]"
    )
    stages: int | None = option(
        "--stages",
        key="stages.count",
        type=click.IntRange(2),
        metavar="S",
        help="Cut the model into stages, which the workers share.",
    )
    config: Path | None = option(
        "--config", type=click.Path(path_type=Path), metavar="RUN.toml", help="The run's settings."
    )
    out: Path = option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        help="The folder for checkpoints, logs and report.  [default: runs/PRESET-TIME]",
    )
    resume: bool = option("--resume", is_flag=True, help="Go on from the checkpoints in --out.")
    links: tuple[str, ...] = option(
        "--link",
        multiple=True,
        metavar="LINK",
        help="The link of each worker, such as 20mbit or 20mbit,delay=50ms,jitter=5ms,loss=0.1 "
        "(connections that break a minute). w0=LINK is for one worker.",
    )
    insecure: bool = option("--insecure", is_flag=True, help="Encrypt nothing.")
    track: tuple[str, ...] = track_option
    web: str | None = web_option
    threads: int | None = None
    program: Sequence[str] = WORKER_PROGRAM

    @classmethod
    def of(cls, typed: Any) -> "Launch":
        """Fills in what was left open. Raises MurmurError: options do not fit one another."""
        if typed.resume and typed.out is None:
            raise MurmurError(
                "--resume: name the folder of the run to go on with, as --out DIR", ExitCode.USAGE
            )
        workers = (typed.stages or 4) if typed.workers is None else typed.workers
        name = typed.preset or (typed.config.stem if typed.config else "diloco")
        out, number = typed.out, 2
        if out is None:
            base = out = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
            while out.exists():
                out, number = base.with_name(f"{base.name}-{number}"), number + 1
        launch: Launch = replace(typed, workers=workers, out=out, threads=cls.fair_threads(workers))
        return launch

    def check(self) -> None:
        """Says what no worker can know. The rest is theirs to refuse. Raises MurmurError."""
        if not 1 <= self.workers <= MAX_WORKERS:
            raise MurmurError(
                f"--workers {self.workers}: one machine takes 1 to {MAX_WORKERS}, each a process "
                "with a model of its own; choose a number in between, or start `murmur up` on more "
                "machines",
                ExitCode.USAGE,
            )
        if self.stages is not None and self.workers % self.stages:
            raise MurmurError(
                f"--workers {self.workers}: {self.stages} stages cannot share them evenly; take "
                f"{self.stages} or a multiple of it",
                ExitCode.USAGE,
            )
        counted = [s for s in self.settings if s.partition("=")[0].strip() == "stages.count"]
        if self.config is not None and self.stages is None and not counted:
            with suppress(OSError, ValueError, AttributeError):  # such a file is theirs to refuse
                read = tomllib.loads(self.config.read_text("utf-8-sig")).get("stages", {})
                if read.get("count", 1) != 1:
                    counted = [f"{self.config}: [stages] count = {read['count']}"]
        if counted:
            raise MurmurError(
                f"{counted[0]}: the workers of a swarm are counted by --stages, such as --stages 2",
                ExitCode.CONFIGURATION,
            )
        self.link_of()
        if self.resume and not self.out.is_dir():
            raise MurmurError(
                f"--resume: there is no folder {self.out}; name that of the run to go on with, as "
                "--out DIR",
                ExitCode.USAGE,
            )

    def link_of(self) -> dict[str, Link | None]:
        """The link of each worker: its own or the common one; empty without. Raises MurmurError."""
        found: dict[str, Link] = {}  # the common one under no name
        try:
            for text in self.links:
                named = _NAMED_LINK.fullmatch(text.strip())
                name, rest = named.groups() if named else ("", text)
                if name and name not in self.names:
                    last = self.names[-1]
                    raise ValueError(f"link {text!r}: there is no {name}; workers are w0 to {last}")
                if name in found:
                    how = f"{name}; leave one out" if name else f"all; name a worker, as w0={text}"
                    raise ValueError(f"link {text!r}: a second one for {how}")
                found[name] = parse_link(rest)
        except ValueError as error:
            raise MurmurError(f"--link: {error}", ExitCode.CONFIGURATION) from error
        return {name: found.get(name, found.get("")) for name in self.names} if found else {}

    @property
    def names(self) -> list[str]:
        return [f"w{index}" for index in range(self.workers)]

    def commands(
        self, addresses: Sequence[str], proxies: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, list[str]]:
        """The command line of each worker, by name. Args: proxies: for workers with slow links."""
        shared = [str(self.config)] if self.config else []
        shared += ["--json", "--no-report", "--min-peers", str(self.workers)]
        shared += ["--resume"] if self.resume else ["--fresh"]
        shared += ["--insecure"] if self.insecure else []
        shared += ["--threads", str(self.threads)] if self.threads else []
        shared += ["--device", self.device] if self.device else []
        for name in self.track:
            shared += ["--track", name]
        for setting, flag in self.typed().items():
            shared += ["--set", setting] if setting.startswith("stages.") else flag.split(" ", 1)
        if self.stages and self.config is None and self.model is None:
            # The built-in model is as deep as its stages need; --set task.architecture=... wins.
            layers = max(3, self.stages)
            shared += ["--set", f"task.architecture={{num_hidden_layers={layers}}}"]
        for setting in self.settings:
            shared += ["--set", setting]
        commands = {}
        for index, (name, address) in enumerate(zip(self.names, addresses, strict=True)):
            own = ["--name", name, "--listen", address, "--out", str(self.out / name)]
            if self.stages and not self.resume:  # then each goes on with that of its checkpoint
                own += ["--stage", str(index % self.stages)]
            for other in addresses:
                own += ["--join", other] if other != address else []
            own += ["--proxy", proxies[name]] if name in proxies else []
            commands[name] = [*self.program, "up", *shared, *own]
        return commands

    @staticmethod
    def fair_threads(workers: int) -> int | None:
        """A worker's share of this machine's cores; None where OMP_NUM_THREADS says it already."""
        if "OMP_NUM_THREADS" in os.environ:
            return None
        return max(1, (len(_cores()) or os.cpu_count() or 1) // max(1, workers))

    @staticmethod
    def fair_cores(workers: int, threads: int | None = 1) -> list[tuple[int, ...]]:
        """The cores that each worker keeps to, so that all are equally fast: else the scheduler
        leaves some behind. Empty where they cannot be shared out evenly, or are too few."""
        cores = _cores()
        if cores and workers % len(cores) == 0 and (threads or 1) == 1:
            return [(cores[index % len(cores)],) for index in range(workers)]
        each = len(cores) // workers
        if len(cores) % workers == 0 and (threads or 1) <= each:
            return [tuple(cores[index * each : (index + 1) * each]) for index in range(workers)]
        return [()] * workers
