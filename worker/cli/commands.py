"""The worker's commands but those that plan. Heavy modules load when a command runs."""

import json
import math
import os
import socket
import sys
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from murmuration.protos.addresses import is_loopback, served_at, split_address
from murmuration.protos.events import Log
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.figures import listed, measured, perplexity
from murmuration.protos.files import RESULTS
from murmuration.worker.cli.options import RunFlags, option, options, track_option, web_option
from murmuration.worker.errors import UsageError
from murmuration.worker.folder import NOTHING, remembered
from murmuration.worker.node.own_address import Addresses
from murmuration.worker.node.supervision import check_memory, end_on_sigterm
from murmuration.worker.views import PagePlace
from murmuration.worker.views.lines import PlainLines, announce_as_json
from murmuration.worker.views.tracking import Trackers

if TYPE_CHECKING:
    from murmuration.worker.config import Config
    from murmuration.worker.identity.certificates import Identity
    from murmuration.worker.node.admission import Newcomer
    from murmuration.worker.training.export import Layout

_PRINTED_USES = 16  # peers that the token which `up` prints lets in
_PATH, _FOLDER = (click.Path(path_type=Path, file_okay=each) for each in (True, False))
_warn = partial(click.echo, err=True)


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """The options that `up` and `join` share."""

    name: str | None = option("--name", help="Name this peer.  [default: from the host and --out]")
    listen: str = option("--listen", default=Addresses.listen, help="Listen on this HOST:PORT.")
    advertise: str | None = option(
        "--advertise",
        help="Tell others to dial this HOST:PORT, or A:PORT,B:PORT; `router`: a port it opens.",
    )
    coordinator: str | None = option("--coordinator", help="Use the coordinator at this HOST:PORT.")
    proxy: str | None = option("--proxy", help="Reach others through an HTTP CONNECT proxy.")
    no_relay: bool = option(
        "--no-relay", is_flag=True, help="Fail, with exit code 9, if others cannot dial this peer."
    )
    relay_mbps: float = option(
        "--relay-mbps",
        type=click.FloatRange(min=0),
        default=Addresses.relay_mbps,
        show_default=True,
        help="Relay at most this many Mbit/s for peers that nobody can dial; 0 relays for none.",
    )
    metrics: str | None = option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Serve figures for Prometheus at /metrics; without HOST on loopback only.",
    )
    web: str | None = web_option
    out: Path = option("--out", type=_PATH, default=Path("runs/worker"), help="The folder.")
    fresh: bool = option(
        "--fresh", is_flag=True, help="Start from step 0, and put earlier checkpoints aside."
    )
    resume: bool = option(
        "--resume", is_flag=True, help="Go on from a checkpoint in OUT, or refuse to start."
    )
    leave_on: str | None = option(
        "--leave-on",
        metavar="FILE|URL",
        help="Leave, save and exit 0 as soon as this file exists or this URL answers.",
    )
    token: str | None = option("--token", help="Join with this token; or set MURMUR_TOKEN.")
    token_file: Path | None = option(
        "--token-file", type=_PATH, help="Read the token from this file."
    )
    insecure: bool = option(
        "--insecure", is_flag=True, help="Encrypt nothing, and let anybody join."
    )
    track: tuple[str, ...] = track_option
    reports: bool = option(
        "--report/--no-report",
        default=True,
        help="Write a report of all peers at the end: report.json and report.txt in OUT.",
    )
    as_json: bool = option("--json", is_flag=True, help="Print events as JSON lines.")
    quiet: bool = option("-q", "--quiet", is_flag=True, help="Print only what needs attention.")
    verbose: bool = option(
        "-v", "--verbose", is_flag=True, help="Print each report and the times of each round."
    )
    stage: int | None = option(
        "--stage", type=click.IntRange(0), help="Serve this stage of a model in stages."
    )
    threads: int | None = option(
        "--threads", type=click.IntRange(1), help="The number of CPU threads for torch."
    )
    device: str = option(
        "--device",
        default="auto",
        show_default=True,
        help="Train on this device: auto, cpu, cuda, cuda:1, mps or xpu.",
    )

    def begin(self, *others: str) -> None:
        """Has SIGTERM end this process, and checks what can be checked before torch loads. Lets
        threads of torch that wait sleep, where all peers share the cores of this machine.

        By OpenMP's own choice they spin, and hold up the worker that has no core meanwhile. One
        that has its cores for itself is up to half faster so. Raises UsageError, MemoryError."""
        end_on_sigterm()
        check_memory()
        self.check_addresses(*others)
        if self.threads is None and is_loopback(split_address(self.listen)[0]):
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, as torch loads

    @property
    def addresses(self) -> Addresses:
        relayed, mbps = not self.no_relay, self.relay_mbps
        return Addresses(self.listen, self.advertise, relayed=relayed, relay_mbps=mbps)

    def found(self, contacts: Sequence[str], seen_from: str = "") -> Addresses:
        """As `Addresses.found`; what a proxy's peers see is the proxy."""
        return self.addresses.found(contacts, "" if self.proxy else seen_from)

    def check_addresses(self, *others: str) -> None:
        """Raises UsageError."""
        _ = self.metrics_address, self.page_place
        named = (("--coordinator ", self.coordinator), ("--proxy ", self.proxy))
        self.addresses.check((*named, *(("", other) for other in others)))

    def newcomer(
        self,
        contacts: Sequence[str],
        wait_s: float | None = None,
        tell: Callable[[str], None] = _warn,
    ) -> "Newcomer":
        from murmuration.worker.node.admission import Newcomer

        known = NOTHING if self.fresh else remembered(self.out, contacts, tell)
        return Newcomer(contacts, proxy=self.proxy, wait_s=wait_s, remembered=known, tell=tell)

    def identity(self, newcomer: "Newcomer", *, trial: bool = False) -> "Identity | None":
        from murmuration.worker.identity.tokens import token_from
        from murmuration.worker.node.admission import Admission

        return Admission(
            folder=self.out,
            default_name=_default_name(self.out),
            name=self.name,
            token=token_from(self.token, self.token_file, tell=_warn),
            insecure=self.insecure,
            public=self.addresses.public,
            listen=self.listen,
            trial=trial,
        ).identity(newcomer)

    @property
    def metrics_address(self) -> str | None:
        """Raises UsageError."""
        return served_at(f"--metrics {self.metrics}", self.metrics)

    @property
    def page_place(self) -> PagePlace | None:
        address = served_at(f"--web {self.web}", self.web)
        return None if address is None else PagePlace(address, self.out)

    @property
    def resumes(self) -> bool | None:
        """As `WorkerOptions.resume`. Raises UsageError."""
        if self.resume and self.fresh:
            raise UsageError(
                "--resume and --fresh: one or the other; without either a worker goes "
                "on where it has a checkpoint"
            )
        return False if self.fresh else self.resume or None

    def held_stage(self) -> int | None:
        """The stage of the checkpoint to go on from, if there is one. Raises CheckpointError."""
        from murmuration.worker.training.checkpoint import held_stage, load

        folder = self.out / "checkpoints"
        held = None if self.fresh else held_stage(folder)
        if held is None and self.resume:
            load(folder)  # says what is wrong
        return held


@click.command()
@click.argument("run", type=_PATH, required=False)
@click.option("--join", "joins", multiple=True, help="Join the peer at this HOST:PORT.")
@click.option(
    "--min-peers", type=click.IntRange(1), help="Start with this many peers.  [default: 1, or 2]"
)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    help="Wait this many seconds for others.",
)
@options("said", RunFlags)
@options("flags", WorkerFlags)
def up(
    run: Path | None,
    joins: tuple[str, ...],
    min_peers: int | None,
    wait_s: float,
    said: RunFlags,
    flags: WorkerFlags,
) -> int:
    """Start a worker, the first of a swarm or one of several.

    RUN is the run's TOML file. Without one the defaults train on Python's own sources."""
    flags.begin(*joins)
    from murmuration.worker.config import load_config

    settings, typed = said.read()
    config = load_config(run, settings, None, typed)
    # A worker that names others does not want to train alone.
    wanted = min_peers or (2 if joins else 1)
    if config.stages.count > 1 and flags.stage is None:
        flags = replace(flags, stage=flags.held_stage())
        if flags.stage is None:
            raise UsageError(
                f"this run has {config.stages.count} stages: say which one this worker serves with "
                f"--stage 0 to {config.stages.count - 1}, or join a run under way with `murmur "
                "join`"
            )
    _check_cut(config, flags.stage)
    contacts = [*joins, *([flags.coordinator] if flags.coordinator else [])]
    with flags.newcomer(contacts, wait_s) as newcomer:
        identity = flags.identity(newcomer)
        found = flags.found(contacts, newcomer.check_run(config, identity))
    waits = {"joins": joins, "min_peers": wanted, "wait_s": wait_s}
    return _run(config, flags, waits | {"remembered": newcomer.remembered}, found, identity)


@click.command()
@click.argument("words", metavar="HOST:PORT... [RUN]", nargs=-1, required=True)
@click.option("--config", type=_PATH, help="Give RUN as an option.")
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0.1),
    help="Wait this long where nobody answers, and for the start.  [default: 120 the first time, "
    "then no end; for the start as long as the others]",
)
@options("said", RunFlags)
@options("flags", WorkerFlags)
def join(
    words: tuple[str, ...],
    config: Path | None,
    wait_s: float | None,
    said: RunFlags,
    flags: WorkerFlags,
) -> int:
    """Join the swarm that the workers or the coordinator at HOST:PORT belong to.

    One address that answers is enough, and members that --out remembers are asked too. The run's
    settings come from there. RUN is a TOML file, as `murmur up` takes it. Its settings of the run
    must agree with the swarm. Those of this machine are used. Code and files must be named there
    or by options: what only the swarm names is refused."""
    addresses, config = addresses_and_run(words, config)
    if not addresses:
        raise UsageError(f"{config}: say whom to join too, as HOST:PORT")
    flags.begin(*addresses)
    from murmuration.worker.node.admission import check_version, clock_warning, join_config

    with flags.newcomer(addresses, wait_s) as newcomer:
        identity = flags.identity(newcomer)
        first = newcomer.ask_run(identity)
        check_version(first)
        if warning := clock_warning(first):
            _warn(f"warning: {warning}")
        found = flags.found([first.address], first.seen_from)
        if first.coordinated:
            flags = replace(flags, coordinator=first.address)
        settings, typed = said.read()
        merged = join_config(first.manifest.sections, config, settings, first.address, typed)
        _check_cut(merged, flags.stage)
        if merged.stages.count > 1 and flags.stage is None:
            if (held := flags.held_stage()) is None:
                held = newcomer.stage_to_serve(first.address, merged.stages, identity)
            flags = replace(flags, stage=held)
    # A joiner never starts a run by itself; it waits as long as the peers that are there do.
    limit_s = math.inf if wait_s is None else wait_s
    waits = {"joins": first.peers(addresses), "min_peers": None, "wait_s": limit_s}
    return _run(merged, flags, waits | {"remembered": newcomer.remembered}, found, identity)


def addresses_and_run(
    words: Sequence[str], config: Path | None
) -> tuple[tuple[str, ...], Path | None]:
    """Splits words into addresses and the run's TOML file. Raises UsageError: two files."""
    files = [each for each in words if each.endswith(".toml") or Path(each).is_file()]
    if len(files) + (config is not None) > 1:
        named = " and ".join([*files, *([f"--config {config}"] if config else [])])
        raise UsageError(f"{named}: name one TOML file")
    return tuple(each for each in words if each not in files), Path(files[0]) if files else config


_of_task = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="task.KEY=VALUE",
    help="Set an option of the task. Code and files must be named here, because a checkpoint "
    "cannot.",
)


@click.command()
@click.argument("run", type=_PATH)
@click.argument("prompt")
@click.option(
    "--bytes", "n_tokens", type=click.IntRange(1), default=400, show_default=True, help="A length."
)
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.7, show_default=True, help="0: greedy."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of what is drawn.")
@_of_task
def generate(
    run: Path, prompt: str, n_tokens: int, temperature: float, seed: int, settings: tuple[str, ...]
) -> None:
    """Continue PROMPT with the newest anchor under the folder RUN."""
    # A token is little work for many threads, and one that has no core holds all others up.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from murmuration.worker.training.evaluation import generate_text

    pieces = generate_text(run, prompt, n_tokens, temperature, seed, settings)
    for piece in chain((prompt,), pieces, ("\n",)):
        click.echo(piece, nl=False)  # which flushes: to be read while the next one is made


@click.command()
@click.argument("run", type=_PATH, metavar="RUN")
@click.option(
    "--split",
    type=click.Choice(["train", "validation"]),
    default="validation",
    show_default=True,
    help="The part of the text.",
)
@_of_task
def evaluate(run: Path, split: str, settings: tuple[str, ...]) -> None:
    """Print loss and perplexity of the newest anchor under the folder RUN.

    It takes the batches of a run's report."""
    from murmuration.worker.training.evaluation import evaluate_checkpoint
    from murmuration.worker.training.export import find_checkpoint

    saved = find_checkpoint(run)
    found = evaluate_checkpoint(saved, split=split, settings=settings)
    figures = f"loss {measured(found.loss, found.error)}, perplexity {perplexity(found.loss)}"
    click.echo(f"{saved.path}: {split} {figures}{listed(found.metrics)}")


@click.command()
@click.argument("run", type=_PATH)
@click.argument("out", metavar="DIR", type=_FOLDER)
@click.option(
    "--to",
    "layout",
    type=click.Choice(["hf", "safetensors"]),
    help="Write Hugging Face's layout or only the tensors.  [default: hf where the model has it]",
)
@_of_task
def export(run: Path, out: Path, layout: "Layout | None", settings: tuple[str, ...]) -> None:
    """Write the newest anchor under the folder RUN to DIR, for others to load.

    DIR/model.safetensors holds parameters and buffers by name. In Hugging Face's layout
    `transformers.AutoModelForCausalLM.from_pretrained(DIR)` loads it. A new run starts from it
    with `--set task.init=DIR`."""
    from murmuration.worker.training.export import export as export_anchor

    path, what = export_anchor(run, out, layout, settings)
    click.echo(f"{path}: {what}")


@click.command()
@click.argument("run", type=_PATH)
@click.option(
    "--out", type=_FOLDER, help="Write the checkpoint to this folder.  [default: RUN/assembled]"
)
@_of_task
def assemble(run: Path, out: Path | None, settings: tuple[str, ...]) -> None:
    """Put the newest checkpoints of all stages below the folder RUN together.

    A run that ends in good order has done so already. This is for one that was cut off. If its
    newest checkpoints are of different steps, a warning says which. `murmur generate` and
    `murmur evaluate` take the result."""
    from murmuration.worker.pipeline.part import assemble as assemble_stages

    out = out or run / "assembled"
    try:
        path, steps = assemble_stages(run, out, settings)
    except OSError as error:
        what = f"--out {out}: no checkpoint can be written there: {error}"
        raise UsageError(f"{what}; choose another folder") from error
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{stage} -> {step}" for stage, step in steps.items())
        _warn(
            f"warning: the newest checkpoints of the stages are of different steps "
            f"(stage -> step: {told}); the model is a mixture, named after the least"
        )
    click.echo(path)


def _run(
    config: "Config",
    flags: WorkerFlags,
    waits: Mapping[str, Any],
    found: Addresses,
    identity: "Identity | None",
) -> int:
    """Args: waits: for whom and how long, as fields of `NodeConfig`."""
    import torch

    from murmuration.worker.daemon import WorkerOptions, run_worker
    from murmuration.worker.node.node import NodeConfig

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    node = NodeConfig(
        **waits,
        **vars(found),
        peer=identity.name if identity else flags.name or _default_name(flags.out),
        proxy=flags.proxy,
        coordinator=flags.coordinator,
        metrics=flags.metrics_address,
        page=flags.page_place,
        stage=flags.stage or 0,
    )
    announce: Log = announce_as_json
    if not flags.as_json:
        announce = PlainLines(_joins(flags, identity), flags.verbose - flags.quiet)
    worker = WorkerOptions(
        node=node,
        leave_on=flags.leave_on,
        out=flags.out,
        resume=flags.resumes,
        device=flags.device,
        announce=announce,
        identity=identity,
    )
    with ExitStack() as stack:
        if names := tuple(dict.fromkeys((*flags.track, *config.run.track))):
            trackers = Trackers(names, flags.out, node.peer, worker.announce)
            stack.callback(trackers.close)
            worker = replace(worker, announce=trackers)
        code = run_worker(config, worker)
    if flags.reports and code == ExitCode.DONE:
        _report(flags)
    return code


def _report(flags: WorkerFlags) -> None:
    context = click.get_current_context()
    group = context.find_root().command
    try:
        peers = json.loads((flags.out / RESULTS).read_text())["peers"]
        if len(peers) > 1 and isinstance(group, click.Group):
            command = group.get_command(context, "report")
            options, quiet = {"as_json": False, "picture": False}, flags.as_json or flags.quiet
            if command is not None:
                context.invoke(command, run=flags.out, quiet=quiet, **options)
    except Exception as error:  # the run is over, and its exit code says how
        _warn(f"murmur: no report of all peers: {error}")


def _check_cut(config: "Config", stage: int | None) -> None:
    if stage is not None and config.stages.count == 1:
        raise UsageError(
            f"--stage {stage}: the model of this run is not cut into stages; leave it out, or set "
            "stages.count"
        )


def _default_name(out: Path) -> str:
    """The same for every start on this machine with this folder: samples depend on the name."""
    place = f"{uuid.getnode()}/{os.path.realpath(out)}"
    return f"{socket.gethostname()}-{zlib.crc32(place.encode()):08x}"


def _joins(flags: WorkerFlags, identity: "Identity | None") -> str:
    """The options that let another machine in. A token is a secret: for a terminal only."""
    from murmuration.worker.identity.authority import Authority

    if identity is None:
        return "--insecure" if flags.insecure else ""
    if (authority := Authority.load(flags.out)) is None:
        return "--token TOKEN, as `murmur token create RUN` gives it where RUN was begun"
    if not sys.stdout.isatty():
        return f"--token TOKEN, as `murmur token create {flags.out}` gives it here"
    return f"--token {authority.create_token(_PRINTED_USES)}"
