"""The options of `murmur swarm`, and the command lines that they become."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from murmuration.algorithms.link import Link
from murmuration.coordinator import Failure
from murmuration.coordinator.link_network import Place, parse_links
from murmuration.protos.events import int_of, text_of
from murmuration.protos.exit_codes import ExitCode
from murmuration.worker.cli.options import RunFlags, option, track_option, web_option

# -P: a folder called worker or protos where the user happens to be is not ours.
WORKER_PROGRAM = (sys.executable, "-P", "-m", "murmuration.worker.cli")
PREFLIGHT_PROGRAM = (sys.executable, "-P", "-m", "murmuration.worker.cli.preflight")
MAX_WORKERS = 64
MEANS = ("auto", "namespaces", "relay")  # of links
_FORWARD_S = 0.01  # of every stage on every worker: only links make their places differ
_MEMORY = 3
_MICROBATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Launch(RunFlags):
    """A swarm to start; None leaves a setting to the config or its default.

    Args:
        held: the stage of each worker, where their checkpoints say it.
        threads: of each worker; None leaves them to the worker. More threads than cores make
            training several times slower, and one worker cannot know how many share the machine.
        program: what runs a worker; tests put their own here.
    """

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
        help="Cut the model into stages.",
    )
    replicas: int | None = option(
        "--replicas", type=click.IntRange(1), metavar="R", help="The workers of each stage."
    )
    routing: str | None = option(
        "--routing",
        key="stages.routing",
        metavar="NAME",
        help="A routing: full, random, stochastic or skip.",
    )
    skip: float | None = option(
        "--skip",
        key="stages.skip",
        type=float,
        metavar="SHARE",
        help="Leave this share out of each route.",
    )
    config: Path | None = option("--config", type=click.Path(path_type=Path), metavar="RUN.toml")
    out: Path = option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        help="The folder for checkpoints, logs and report.  [default: runs/PRESET-TIME]",
    )
    coordinator: bool = option(
        "--coordinator/--no-coordinator", default=False, help="Start a coordinator too."
    )
    resume: bool = option("--resume", is_flag=True, help="Go on from the checkpoints in --out.")
    links: tuple[str, ...] = option(
        "--link",
        multiple=True,
        metavar="LINK",
        help="The link of each worker, such as 20mbit or 20mbit,delay=50ms,jitter=5ms,loss=0.1 "
        "(connections that break a minute). w0=LINK is for one worker.",
    )
    link_means: str = option(
        "--link-means",
        type=click.Choice(MEANS),
        default="auto",
        show_default=True,
        help="The means that make links slow; namespaces need root.",
    )
    insecure: bool = option("--insecure", is_flag=True, help="Encrypt nothing.")
    track: tuple[str, ...] = track_option
    web: str | None = web_option
    threads: int | None = None
    held: tuple[int, ...] = ()
    program: Sequence[str] = WORKER_PROGRAM

    @classmethod
    def of(cls, typed: Any) -> "Launch":
        """What was typed, with the workers, the folder and the threads that it leaves open.

        Args: typed: a launch whose `workers` and `out` may be None.

        Raises:
            Failure: options do not fit one another.
        """
        if typed.resume and typed.out is None:
            raise Failure(
                "--resume: name the folder of the run to go on with, as --out DIR", ExitCode.USAGE
            )
        workers = _worker_count(typed)
        name = typed.preset or (typed.config.stem if typed.config else "diloco")
        out, threads = typed.out or _new_folder(name), cls.fair_threads(workers)
        launch: Launch = replace(typed, workers=workers, out=out, threads=threads)
        return launch

    def check(self) -> None:
        """Says at once what workers would say after they have started. Raises Failure."""
        if not 1 <= self.workers <= MAX_WORKERS:
            raise Failure(
                f"--workers {self.workers}: one machine takes 1 to {MAX_WORKERS}, each a process "
                "with a model of its own; choose a number in between, or start `murmur up` on more "
                "machines",
                ExitCode.USAGE,
            )
        for flag, value in (("--steps", self.steps), ("--inner-steps", self.inner_steps)):
            if value is not None and value < 1:
                raise Failure(f"{flag} {value}: must be at least 1", ExitCode.CONFIGURATION)
        for setting in self.settings:
            if "=" not in setting:
                raise Failure(
                    f"--set {setting}: write section.key=value, such as diloco.inner_steps=50",
                    ExitCode.CONFIGURATION,
                )
        self._check_routing()
        self.link_of()
        if self.resume and not self.out.is_dir():
            raise Failure(
                f"--resume: there is no folder {self.out}; name that of the run to go on with, as "
                "--out DIR",
                ExitCode.USAGE,
            )

    def _check_routing(self) -> None:
        """A skip that the routing leaves no room for, where flags alone say so: the fix is a flag
        too. Raises Failure."""
        keys = {setting.partition("=")[0].strip() for setting in self.settings}
        elsewhere = "stages.routing" in keys or (self.config and self.routing is None)
        if not self.skip or elsewhere:
            return
        from murmuration.algorithms.skippipe.routing import NEVER_SKIP

        routing = self.routing or "full"
        if routing in NEVER_SKIP:
            raise Failure(
                f"--skip {self.skip:g}: routing {routing!r} visits every stage; say --routing skip "
                "(or random), or leave --skip out",
                ExitCode.CONFIGURATION,
            )

    def link_of(self) -> dict[str, Link | None]:
        """The link of each worker; empty where there is no --link. Raises Failure."""
        if not self.links:
            return {}
        try:
            return parse_links(self.links, self.workers)
        except ValueError as error:
            raise Failure(f"--link: {error}", ExitCode.CONFIGURATION) from error

    @property
    def names(self) -> list[str]:
        return [f"w{index}" for index in range(self.workers)]

    def resumed(self, held: Sequence[int | None]) -> "Launch":
        """Each worker goes on with the stage of its checkpoint: it may have moved.

        Raises:
            Failure: they are not of all stages, or not every worker has one.
        """
        assert self.stages is not None, "the model is cut"
        stages = ", ".join(
            f"{name} of {'none' if stage is None else stage}"
            for name, stage in zip(self.names, held, strict=True)
        )
        fix = "go on with the --stages and --replicas that it was started with, or without --resume"
        own = [stage for stage in held if stage is not None]
        if len(own) < len(held) or set(own) != set(range(self.stages)):
            raise Failure(
                f"--resume: the checkpoints in {self.out} are not of stages 0 to "
                f"{self.stages - 1}, one of each worker's: {stages}; {fix}",
                ExitCode.CHECKPOINT,
            )
        return replace(self, held=tuple(own))

    def request(self, presets: Sequence[str] = ()) -> dict[str, Any]:
        """What to ask of the preflight, for several presets or that of the launch."""
        flags = self._flags()
        return {
            "config": str(self.config) if self.config else None,
            "settings": [*flags, *self.settings],
            "flags": flags,
            "presets": list(presets) or [self.preset],
            "resume": [str(self.out / name) for name in self.names] if self.resume else [],
        }

    def settings_typed(self) -> dict[str, object]:
        """The settings that stand in the report where no worker has reported them."""
        return {key: getattr(self, key) for key in ("preset", "steps", "inner_steps", "seed")}

    def commands(
        self,
        addresses: Sequence[str],
        coordinator: str | None,
        places: Mapping[str, Place] | None = None,
    ) -> dict[str, list[str]]:
        """The command line of each worker, by name: `w0`, `w1`, ..., one per address."""
        shared = [str(self.config)] if self.config else []
        shared += ["--json", "--no-report", "--min-peers", str(self.workers)]
        shared += ["--resume"] if self.resume else ["--fresh"]
        shared += ["--insecure"] if self.insecure else []
        shared += ["--coordinator", coordinator] if coordinator else []
        shared += ["--preset", self.preset] if self.preset else []
        shared += ["--threads", str(self.threads)] if self.threads else []
        shared += ["--device", self.device] if self.device else []
        for name in self.track:
            shared += ["--track", name]
        for setting in (*self._flags(), *self.settings):
            shared += ["--set", setting]
        placed = list(self.held)
        if self.stages and not placed:
            placed = stages_of(self.link_of(), self.workers, self.stages, self.routing or "full")
        commands = {}
        for index, (name, address) in enumerate(zip(self.names, addresses, strict=True)):
            place = (places or {}).get(name, Place(address))
            own = ["--name", name, "--listen", address, "--out", str(self.out / name)]
            own += ["--stage", str(placed[index])] if placed else []
            for other in addresses:
                own += ["--join", other] if other != address else []
            commands[name] = [
                *(*place.prefix, *self.program, "up"),
                *(*shared, *own, *place.options),
            ]
        return commands

    @staticmethod
    def fair_threads(workers: int) -> int | None:
        """A worker's share of this machine's cores; None where OMP_NUM_THREADS says it already."""
        if "OMP_NUM_THREADS" in os.environ:
            return None
        return max(1, core_count() // max(1, workers))

    @staticmethod
    def fair_cores(workers: int, threads: int | None = 1) -> list[tuple[int, ...]]:
        """The cores that each worker keeps to, so that all are equally fast, as machines of their
        own would be: otherwise the scheduler leaves some behind, and the others wait for them.

        Empty, which is any core, where they cannot be shared out evenly, and for workers with more
        threads than that.
        """
        cores = _cores()
        if cores and workers % len(cores) == 0 and (threads or 1) == 1:
            return [(cores[index % len(cores)],) for index in range(workers)]
        each = len(cores) // workers
        if len(cores) % workers == 0 and (threads or 1) <= each:
            return [tuple(cores[index * each : (index + 1) * each]) for index in range(workers)]
        return [()] * workers

    def _flags(self) -> dict[str, str]:
        """The options that stand for a config key: by setting, with its value as TOML, the option
        as typed."""
        typed = self.typed()
        if self.stages and self.config is None and self.model is None:
            # The built-in model is as deep as its stages need; --set task.architecture=... wins.
            layers = max(3, self.stages)
            setting = f"task.architecture={{num_hidden_layers={layers}}}"
            typed[setting] = f"--stages {self.stages}"
        return typed


def _worker_count(typed: Any) -> int:
    """As many as the stages take. Raises Failure: options that do not fit one another."""
    workers, stages, replicas = typed.workers, typed.stages, typed.replicas
    if stages is None:
        for flag in ("replicas", "routing", "skip"):
            if getattr(typed, flag) is not None:
                raise Failure(
                    f"--{flag}: of a model in stages; add --stages, such as --stages 4",
                    ExitCode.USAGE,
                )
        return 4 if workers is None else int(workers)
    if workers is not None and (workers % stages or replicas not in (None, workers // stages)):
        raise Failure(
            f"--workers {workers}: {stages} stages of {replicas or 'equally many'} replicas are "
            f"something else; leave --workers out",
            ExitCode.USAGE,
        )
    return int(stages * (replicas or (workers // stages if workers else 1)))


def _new_folder(name: str) -> Path:
    """A folder that is not there yet, named after the run and the time."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def core_count() -> int:
    """How many cores this process and its workers may use."""
    return len(_cores()) or os.cpu_count() or 1


def _cores() -> list[int]:
    """The cores that this process may use; empty where the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else []


def ask_worker(
    request: Mapping[str, Any], program: Sequence[str] = PREFLIGHT_PROGRAM
) -> dict[str, Any]:
    """Asks the worker's own code what it would refuse, before any worker is started.

    In a process of its own: the rules are the worker's, and so is torch, which they need.

    Returns:
        The answer to the request; `murmuration.worker.cli.preflight` says what is in either.

    Raises:
        Failure: with the line and the exit code that a worker would end with.
    """
    done = subprocess.run(
        program, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.returncode != 0 or not isinstance(answer, dict):
        cause = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Failure(f"no worker can be started here: {cause}", ExitCode.FAILED)
    if (refused := text_of(answer, "refused")) is not None:
        preset = text_of(answer, "preset")
        several = len(request["presets"]) > 1 and preset and not refused.startswith("--preset ")
        line = f"preset {preset}: {refused}" if several else refused
        raise Failure(line, int_of(answer, "exit_code") or ExitCode.FAILED)
    return answer


def stages_of(
    links: Mapping[str, Link | None], workers: int, stages: int, routing: str
) -> list[int]:
    """The stage of each worker, in turns; on links of their own, where an iteration is shortest.

    Args:
        links: by name, `w0`, `w1`, ...; empty or all alike leaves them in turns.
        workers: a multiple of `stages`.
        routing: of the run.
    """
    known = [links.get(f"w{index}") for index in range(workers)]
    if len(set(known)) < 2:
        return [index % stages for index in range(workers)]
    import numpy as np

    from murmuration.algorithms.skippipe.assignment import StageCandidates, propose_placement
    from murmuration.algorithms.skippipe.pipeline import Links
    from murmuration.algorithms.skippipe.route import Rules

    swarm = StageCandidates(
        links=Links.of_lines(known),
        message_bytes=4 * 128 * 96 * 2,  # samples, context and width of the model tiny in bf16
        exchange_s=np.zeros((workers, workers)),
        memory=(_MEMORY,) * workers,
        forward_s=np.full((workers, stages), _FORWARD_S),
        backward_s=np.full((workers, stages), 2.5 * _FORWARD_S),
        loss_s=np.full(workers, _FORWARD_S / 4),
    )
    placed = propose_placement(
        swarm,
        (workers // stages,) * stages,
        Rules(stages=stages, visited=stages),
        _MICROBATCHES,
        routing=routing,
        shared_uplinks=True,
    )
    stage_of = {worker: stage for stage, served in enumerate(placed) for worker in served}
    return [stage_of[index] for index in range(workers)]
