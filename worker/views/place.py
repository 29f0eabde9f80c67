"""Where a page is served, the secret that its readers show, and what is said of both."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from murmuration.protos.events import new_event
from murmuration.worker.identity import FOLDER
from murmuration.worker.identity.certificates import write_secret

_TOKEN = "page-token"


@dataclass(frozen=True)
class PagePlace:
    """Args:
    address: HOST:PORT to serve at; port 0 takes a free one.
    folder: of the worker or coordinator, where token and certificate are.
    """

    address: str
    folder: Path


def page_event(url: str, token_path: Path | None) -> dict[str, object]:
    """The event that is logged; where readers show a token, with its file, never the token."""
    kept = {"token_file": str(token_path)} if token_path else {}
    return new_event("page", url=url, **kept)


def page_words(event: Mapping[str, object], *, terminal: bool) -> str:
    """The same for a person. On a terminal the address is complete; elsewhere, which may be a log,
    it says where the secret is."""
    url, kept = str(event["url"]), event.get("token_file")
    if kept is None:
        return f"the page of the swarm: {url}"
    if not terminal:
        return f"the page of the swarm: {url}#TOKEN, with what is in {kept}"
    return f"the page of the swarm: {url}#{Path(str(kept)).read_text().strip()}"


def page_token(folder: Path) -> tuple[str, Path]:
    """The secret that a reader shows off loopback, and its file, which only its user can read; a
    new one where there is none. Raises OSError."""
    path = folder / FOLDER / _TOKEN
    if path.exists() and (kept := path.read_text().strip()):
        return kept, path
    token = secrets.token_urlsafe(24)
    write_secret(path, token.encode())
    return token, path
