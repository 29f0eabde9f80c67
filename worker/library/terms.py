"""What a loop of one's own and its run agree on: addresses, arguments, the config of both."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from murmuration.algorithms.fragments import TensorSpec
from murmuration.protos.addresses import is_loopback, is_wildcard, split_address, with_host
from murmuration.protos.events import NO_END
from murmuration.protos.manifest import first_difference
from murmuration.worker.addresses import FoundHost, find_host
from murmuration.worker.config import Config, load_config
from murmuration.worker.errors import ConfigError, ManifestRefused, UsageError
from murmuration.worker.identity import Identity
from murmuration.worker.library.arguments import check_once
from murmuration.worker.library.site import is_site
from murmuration.worker.manifest import Manifest, join_config
from murmuration.worker.newcomer import FirstAnswer, Newcomer, check_version
from murmuration.worker.tasks import OWN_LOOP
from murmuration.worker.training.config import KSEED
from murmuration.worker.views import PagePlace


@dataclass(frozen=True)
class Addresses:
    """Of a peer, and those to join at: `HOST:PORT` each."""

    listen: str
    advertise: str | None
    joins: tuple[str, ...]

    def check(self) -> None:
        """Raises UsageError for what is no HOST:PORT."""
        given = filter(None, (self.advertise, *self.joins))
        try:
            for each in (self.listen, *given):
                split_address(each)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if self.advertise and is_wildcard(split_address(self.advertise)[0]):
            raise UsageError(f"advertise={self.advertise!r}: nobody can dial that; name a host")

    @property
    def public(self) -> bool:
        """Whether other machines can reach the peer."""
        own = (self.listen, *([self.advertise] if self.advertise else []))
        return not all(is_loopback(split_address(each)[0]) for each in own)


def served_at(argument: str, given: str | int | None) -> str | None:
    """HOST:PORT, of a port of loopback too. Raises UsageError."""
    try:
        return None if given is None else with_host(str(given))
    except ValueError as error:
        raise UsageError(f"{argument}: {error}") from error


def page_place(given: str | int | None, out: Path | None) -> PagePlace | None:
    """Where to serve the page. Raises UsageError."""
    if (address := served_at("web", given)) is None:
        return None
    if out is None and not is_loopback(split_address(address)[0]):
        raise UsageError(
            f"web={given!r}: readers show a token, which is kept in a folder: say out="
        )
    return PagePlace(address, out or Path())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a script the options of `Swarm` that differ between machines: `--join`, `--listen`,
    `--advertise`, `--name`, `--min-peers`, `--wait-s`, `--out`, `--serve-metrics`, `--web`,
    `--no-relay`, `--relay-mbps`, `--token`, `--insecure`, `--progress`.

    Swarm(model, optimizer, **vars(parser.parse_args())) takes them as they are.

    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> options = parser.parse_args(["--join", "one.example:7700", "--name", "second"])
    >>> options.join, options.name, options.insecure
    (['one.example:7700'], 'second', False)
    """
    group = parser.add_argument_group("swarm")
    group.add_argument(
        "--join", nargs="+", action="extend", metavar="HOST:PORT", help="of peers of the run"
    )
    group.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="to serve")
    group.add_argument("--advertise", metavar="HOST:PORT", help="that others reach this peer at")
    group.add_argument("--name", help="of this peer")
    group.add_argument("--min-peers", type=int, help="start when this many are here")
    group.add_argument("--wait-s", type=float, help="where nobody answers, and for the start")
    group.add_argument("--out", help="folder for events.jsonl and the peer's certificate")
    group.add_argument("--serve-metrics", metavar="[HOST:]PORT", help="for Prometheus")
    group.add_argument("--web", metavar="[HOST:]PORT", help="serve the page of the swarm")
    group.add_argument("--no-relay", action="store_true", help="end where others cannot dial it")
    group.add_argument("--relay-mbps", type=float, default=100.0, help="to relay for others at")
    group.add_argument("--token", help="that lets this peer in; or the variable MURMUR_TOKEN")
    group.add_argument("--insecure", action="store_true", help="encrypt nothing")
    group.add_argument("--progress", action="store_true", help="print lines as `murmur up` does")


class Terms(NamedTuple):
    """The run's config, who gave it, and the host to advertise, if not given."""

    config: Config
    first: FirstAnswer | None
    found: FoundHost | None


def settings_by_argument(
    preset: str | None,
    inner_steps: int | None,
    steps: int | None,
    more: Mapping[str, object] | None,
) -> dict[str, str]:
    """`section.key=value` as the TOML has it, by the argument that says so. Raises UsageError: two
    say one thing."""
    named: dict[str, object] = {}
    if preset is not None:
        named["diloco.preset"] = preset
    if inner_steps is not None:
        named["diloco.inner_steps"] = inner_steps
    if steps is not None:
        named["run.steps"] = steps
    check_once({"preset": preset, "inner_steps": inner_steps, "steps": steps}, more or {})
    arguments = {"diloco.preset": "preset", "diloco.inner_steps": "inner_steps"}
    arguments["run.steps"] = "steps"
    found = {f"{k}={json.dumps(v)}": f"{arguments[k]}={v!r}" for k, v in named.items()}
    return found | {f"{k}={json.dumps(v)}": f"settings[{k!r}]" for k, v in (more or {}).items()}


def agree_on_terms(
    given: Mapping[str, str],
    addresses: Addresses,
    schema: Sequence[TensorSpec],
    newcomer: Newcomer,
    identity: Identity | None,
) -> Terms:
    """What this peer and the run agree on. Raises as `Swarm`."""
    first: FirstAnswer | None = None
    if not addresses.joins:
        config = _started(given)
    else:
        first = newcomer.ask_run(identity)
        where = first.address
        config = _joined(given, first)
        own = Manifest.of(config, schema)
        if different := first_difference(own.agreed, first.manifest.agreed):
            raise ManifestRefused(
                f"{where} trains another model: {different}; build the same one, with the same "
                "parts frozen, or join another run"
            )
    if config.run.evaluate_every:
        raise ConfigError(
            "settings: run.evaluate_every is for tasks: a loop of your own evaluates by itself, "
            "the anchor within `with swarm.anchor()`; leave it out"
        )
    if config.run.track:
        raise ConfigError(
            "settings: run.track is for tasks: a loop of your own has trackers of its own, and "
            "`swarm.metrics` for them; leave it out"
        )
    found = None
    if addresses.advertise is None:
        contacts = [first.address] if first else []
        found = find_host(addresses.listen, contacts, first.seen_from if first else "")
    if is_site() and config.plan.payload == "gradient":
        raise UsageError(
            "preset ddp averages gradients at every step, which a site of several processes does "
            "by itself; use diloco or streaming between sites"
        )
    return Terms(config, first, found)


def steps_of(config: Config) -> int | None:
    """Of a run; None without an end."""
    return None if config.run.steps >= NO_END else config.run.steps


def _started(given: Mapping[str, str]) -> Config:
    task = f'task.name="{OWN_LOOP}"'
    ends = () if any(each.startswith("run.steps=") for each in given) else (f"run.steps={NO_END}",)
    config = load_config(None, [task, *ends, *given], None, given)
    if config.inner.optimizer == KSEED:
        raise ConfigError(
            "preset='kseed' is for tasks: the optimizer of your loop is your own; take another"
        )
    return config


def _joined(given: Mapping[str, str], first: FirstAnswer) -> Config:
    check_version(first)
    manifest, where = first.manifest, first.address
    task = manifest.sections.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    if name != OWN_LOOP:
        raise ManifestRefused(
            f"{where} trains the task {name!r}, not a loop of its own: join it with "
            f"`murmur join {where}`"
        )
    frozen = [each for each in given if each.startswith("task.frozen=")]
    options = manifest.sections["task"]
    if frozen != [f"task.frozen={json.dumps(options[key])}" for key in options if key == "frozen"]:
        raise ManifestRefused(
            f"{where} has other frozen parameters than this model: load the same checkpoint, and "
            "freeze the same part of it"
        )
    return join_config(manifest.sections, None, list(given), where)
