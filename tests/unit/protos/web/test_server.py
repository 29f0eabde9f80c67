"""The page over real sockets: on loopback, and off it with its token."""

import json
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from protos.identity import Authority, Role
from protos.web import PagePlace, page_event, page_words
from protos.web.history import Look
from protos.web.place import page_token
from protos.web.server import PageServer

DOCUMENT = {"peer": "w0", "members": [{"peer": "w0", "health": "alive", "phase": "training"}]}


@contextmanager
def serving(place: PagePlace, *, encrypted: bool = False) -> Iterator[PageServer]:
    """A server that has looked at the swarm."""
    looked = threading.Event()

    def look() -> Look:
        if looked.is_set():
            raise TimeoutError("nobody answers any more")
        looked.set()
        return Look(100.0, DOCUMENT, {"w0": DOCUMENT})

    server = PageServer(place, look, encrypted=encrypted)
    try:
        assert looked.wait(60)
        yield server
    finally:
        server.close()


def asked(url: str, token: str = "") -> Any:
    """Args: url: of a listener on all addresses, which is reached on loopback."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    request = Request(f"{url.replace('0.0.0.0', '127.0.0.1')}api/swarm", headers=headers)
    with urlopen(request, context=unverified) as answer:
        return json.load(answer)


def test_on_loopback_it_needs_nothing(tmp_path: Path) -> None:
    with serving(PagePlace("127.0.0.1:0", tmp_path), encrypted=True) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.token_path is None
        assert "peers" in asked(server.url)
        assert not list(tmp_path.iterdir())


def test_off_loopback_an_encrypted_run_speaks_https_and_wants_the_token(tmp_path: Path) -> None:
    Authority.make(tmp_path).new_identity(Role.PEER, "w0").save(tmp_path)
    with serving(PagePlace("0.0.0.0:0", tmp_path), encrypted=True) as server:
        assert server.url.startswith("https://0.0.0.0:")
        assert server.token_path is not None
        with pytest.raises(HTTPError, match="401") as refused:
            asked(server.url)
        refused.value.close()
        assert "peers" in asked(server.url, server.token_path.read_text())


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with serving(PagePlace("127.0.0.1:0", tmp_path)) as server:
        taken = server.url.removeprefix("http://").rstrip("/")
        with pytest.raises(
            OSError, match=f"^cannot listen on {taken}: .*choose another with --web"
        ):
            PageServer(PagePlace(taken, tmp_path), lambda: Look(0, {}, {}), encrypted=False)


def test_the_token_is_kept_for_its_user_alone_and_stays(tmp_path: Path) -> None:
    token, path = page_token(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 32
    assert page_token(tmp_path) == (token, path)
    assert page_token(tmp_path / "another")[0] != token


def test_the_token_is_said_on_a_terminal_and_never_logged(tmp_path: Path) -> None:
    token, path = page_token(tmp_path)
    event = page_event("https://192.0.2.7:8900/", path)
    assert token not in json.dumps(event)
    assert token not in page_words(event, terminal=False)
    assert str(path) in page_words(event, terminal=False)
    assert page_words(event, terminal=True).endswith(f"https://192.0.2.7:8900/#{token}")
    local = page_event("http://127.0.0.1:8900/", None)
    assert page_words(local, terminal=False).endswith(" http://127.0.0.1:8900/")
