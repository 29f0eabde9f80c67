"""`--link` as it was typed, for each worker."""

import re
from collections.abc import Sequence

import click

from algorithms.link import Link, parse_link
from coordinator.links import MEANS

_NAMED = re.compile(r"(w\d+)=(.*)", re.DOTALL)


def parse_links(texts: Sequence[str], workers: int) -> dict[str, Link | None]:
    """The link of each worker, `w0`, `w1`, ...: its own, else the one without a name, else None.

    Args:
        texts: `20mbit,delay=50ms` for all others, `w0=5mbit` for one worker.

    Raises:
        ValueError: what is wrong, and how to write it.
    """
    names = [f"w{index}" for index in range(workers)]
    own: dict[str, Link] = {}
    common: Link | None = None
    for text in texts:
        named = _NAMED.fullmatch(text.strip())
        if named is None:
            if common is not None:
                raise ValueError(
                    f"link {text!r}: a second one for all; name a worker, as w0={text}"
                )
            common = parse_link(text)
            continue
        name, rest = named.groups()
        if name not in names:
            raise ValueError(f"link {text!r}: there is no {name}; workers are w0 to {names[-1]}")
        if name in own:
            raise ValueError(f"link {text!r}: a second one for {name}; leave one out")
        own[name] = parse_link(rest)
    return {name: own.get(name, common) for name in names}


link_means_option = click.option(
    "--link-means",
    type=click.Choice(MEANS),
    default="auto",
    show_default=True,
    help="What makes links slow; namespaces need root.",
)
