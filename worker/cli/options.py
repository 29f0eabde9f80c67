"""The options in frozen dataclasses, and links, that commands share. It loads no torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from murmuration.worker.errors import UsageError
from murmuration.worker.views.tracking import TRACKERS

if TYPE_CHECKING:
    from murmuration.algorithms.link import Link

_Command = Callable[..., Any]
# Where presets are defined, torch is needed.
PRESETS = (
    "diloco", "streaming", "co2", "onebit", "sparse", "noloco", "streaming-noloco", "kseed", "ddp",
    "local",
)  # fmt: skip


def option(*names: str, key: str = "", **attributes: Any) -> Any:
    """A field of a dataclass that is an option. Args: key: of the TOML, that it stands for."""
    usual = () if attributes.get("multiple") else False if attributes.get("is_flag") else None
    return field(
        default=attributes.get("default", usual),
        metadata={"names": names, "attributes": attributes, "key": key},
    )


def options(argument: str, group: type, unlisted: str = "") -> Callable[[_Command], _Command]:
    """Gives a command a dataclass's options as one argument; `--help` lists no `unlisted` ones."""
    typed = [each for each in fields(group) if each.metadata]

    def decorate(command: _Command) -> _Command:
        @wraps(command)
        def grouped(**values: Any) -> Any:
            own = group(**{each.name: values.pop(each.name) for each in typed})
            return command(**values, **{argument: own})

        decorated: _Command = grouped
        for each in reversed(typed):
            names, attributes = each.metadata["names"], each.metadata["attributes"]
            hidden = each.name in unlisted.split()
            decorated = click.option(*names, each.name, hidden=hidden, **attributes)(decorated)
        return decorated

    return decorate


preset_option = option(
    "--preset",
    key="diloco.preset",
    shell_complete=lambda _context, _option, begun: [p for p in PRESETS if p.startswith(begun)],
    help=f"The preset: {', '.join(PRESETS[:-1])} or {PRESETS[-1]}.",
)
settings_option = option(
    "--set",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set one key of the configuration; may be given several times.",
)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    preset: str | None = preset_option
    steps: int | None = option(
        "--steps", key="run.steps", type=int, metavar="N", help="The inner steps of the whole run."
    )
    inner_steps: int | None = option(
        "--inner-steps",
        key="diloco.inner_steps",
        type=int,
        metavar="H",
        help="The inner steps between rounds.",
    )
    seed: int | None = option(
        "--seed", key="run.seed", type=int, metavar="S", help="The seed of all that is drawn."
    )
    text: str | None = option(
        "--text", key="task.text", metavar="PATH", help="A file, folder or glob to learn from."
    )
    model: str | None = option(
        "--model", key="task.model", metavar="NAME", help="The model: tiny, small or base."
    )
    settings: tuple[str, ...] = settings_option

    def typed(self) -> dict[str, str]:
        """The options that stand for a key, as typed, by setting: `section.key=value` in TOML."""
        return {
            f"{key}={json.dumps(value, ensure_ascii=False)}": f"{each.metadata['names'][0]} {value}"
            for each in fields(self)
            if (key := each.metadata.get("key")) and (value := getattr(self, each.name)) is not None
        }

    def read(self) -> tuple[list[str], dict[str, str]]:
        """(the settings, those with options of their own last; these options, by setting)."""
        typed = self.typed()
        return [*self.settings, *typed], typed


track_option = option(
    "--track",
    multiple=True,
    type=click.Choice(TRACKERS),
    help="Send the run's figures to this tracker; may be given several times.",
)
web_option = option(
    "--web",
    metavar="[HOST:]PORT",
    help="Serve a page that shows the swarm; without HOST on loopback only.",
)


def link_of(text: str) -> "Link":
    """Raises UsageError."""
    from murmuration.algorithms.link import parse_link

    try:
        return parse_link(text)
    except ValueError as error:
        raise UsageError(f"--link: {error}") from error
