"""What `make bench` was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.algorithms.link import Link, parse_link
from murmuration.coordinator import Failure
from murmuration.coordinator.launch import WORKER_PROGRAM, Launch
from murmuration.protos.exit_codes import ExitCode

LINKS = ("2mbit", "20mbit", "100mbit", "1000mbit")
PRESETS = ("local", "ddp", "diloco", "streaming")
TORCH_DDP = "torch-ddp"
SYSTEMS = (TORCH_DDP, "torchft", "hivemind")
LOCAL = "local"
_DEFAULT_INNER_STEPS = {  # a preset's own
    "streaming": 50, "streaming-noloco": 50, "co2": 10, "onebit": 28, "sparse": 10,
}  # fmt: skip
_OTHERS_INNER_STEPS = 20
_INNER_STEPS_KEY = "diloco.inner_steps"
MEANS = ("auto", "namespaces", "relay")  # of links
_THEIRS_TOO = ("task.", "inner.", "run.")  # settings that other systems would have to share


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The runs of a comparison: each of `presets` and `systems` on each of `links`.

    Args:
        links: as typed; the same for every worker.
        presets: passed on to the workers; `local` is run in any case, first.
        systems: of `SYSTEMS`, those to compare with.
        inner_steps: H of every preset that has rounds and of the systems; None leaves it to each.
        settings: `--set` for the presets' workers.
        limit_s: about how long a run may train; longer ones are cut to fewer steps.
        out: a folder for all runs.
        program: what runs a worker; tests put their own here.
        root: where `tests/lab/peers` and `.venv-peers` are looked for.
    """

    links: tuple[str, ...] = LINKS
    presets: tuple[str, ...] = PRESETS
    systems: tuple[str, ...] = ()
    workers: int = 4
    steps: int = 400
    inner_steps: int | None = None
    seed: int = 0
    settings: tuple[str, ...] = ()
    limit_s: float = 300.0
    link_means: str = "auto"
    out: Path
    program: Sequence[str] = WORKER_PROGRAM
    root: Path = Path()

    def check(self) -> None:
        """Says at once what would come out after hours. Raises Failure."""
        parsed = self.parsed_links()
        for kind, values in (
            ("--link", [str(link) for link in parsed]),
            ("--preset", self.presets),
        ):
            twice = next((value for value in values if list(values).count(value) > 1), None)
            if twice:
                raise Failure(f"{kind} {twice}: asked for twice; leave one out", ExitCode.USAGE)
        self.launch(LOCAL, self.links[0], self.steps).check()
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise Failure(
                f"--out {self.out}: is there already; choose a folder that is not", ExitCode.USAGE
            )

    def parsed_links(self) -> list[Link]:
        """Raises Failure."""
        try:
            return [parse_link(text) for text in self.links]
        except ValueError as error:
            raise Failure(f"--link: {error}", ExitCode.CONFIGURATION) from error

    @property
    def order(self) -> tuple[str, ...]:
        """The presets as they are run."""
        return (LOCAL, *(preset for preset in self.presets if preset != LOCAL))

    def launch(self, preset: str, link: str, steps: int) -> Launch:
        """One torch thread a worker, so that all runs compare."""
        return Launch(
            workers=self.workers,
            out=self.folder(preset, link),
            preset=preset,
            steps=steps,
            inner_steps=self.inner_steps,
            seed=self.seed,
            settings=self.settings,
            threads=1,
            links=(link,),
            program=self.program,
        )

    def folder(self, name: str, link: str) -> Path:
        """That of one run: `OUT/20mbit-delay-50ms/diloco`."""
        plain = link.replace(" ", "").replace(",", "-").replace("=", "-")
        return self.out / plain / name

    def period_steps(self, preset: str) -> int:
        """H as far as it is known before the run."""
        if preset in ("ddp", TORCH_DDP):
            return 1  # whatever is set
        own = _DEFAULT_INNER_STEPS.get(preset, _OTHERS_INNER_STEPS)
        chosen = self.inner_steps or own
        for setting in self.settings:
            key, _, value = setting.partition("=")
            if key.strip() == _INNER_STEPS_KEY and value.strip().isdecimal():
                chosen = max(1, int(value))
        return chosen

    def unshared_setting(self) -> str | None:
        """A setting that changes what is trained, which other systems would not follow."""
        return next((text for text in self.settings if text.strip().startswith(_THEIRS_TOO)), None)
