"""The page: who may read what of it, and how it is sent; over real sockets, with its token."""

import json
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from starlette.testclient import TestClient

from murmuration.protos.addresses import split_address
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role
from murmuration.worker.views import PagePlace, page
from murmuration.worker.views.history import History, Look
from murmuration.worker.views.lines import page_event, page_words
from murmuration.worker.views.page import HEADERS, PageServer, page_app, page_token

STATIC = Path(page.__file__).with_name("static")
TOKEN = "a-secret-of-this-test"
FILES = ("/", "/page.js", "/page.css", "/uplot.js", "/uplot.css")
DOCUMENT = {"peer": "w0", "members": [{"peer": "w0", "health": "alive", "phase": "training"}]}
LOOK = Look(100.0, DOCUMENT, {"w0": DOCUMENT})


def client(token: str | None = None, host: str = "127.0.0.1:8900") -> TestClient:
    history = History(2.0)
    history.add(LOOK)
    return TestClient(page_app(history, token), base_url=f"http://{host}")


@pytest.mark.parametrize("path", [*FILES, "/api/swarm"])
def test_everything_is_there_on_loopback(path):
    answer = client().get(path)
    assert answer.status_code == 200
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "set-cookie" not in answer.headers


def test_the_policy_allows_no_code_but_the_pages_own():
    policy = HEADERS["content-security-policy"]
    assert {"default-src 'none'", "script-src 'self'"} <= set(policy.split("; "))
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/swarm"])
def test_it_is_for_reading_alone(method, path):
    assert client().request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/..%2fapp.py", "/static/page.js", "/uPlot.LICENSE", "/api/"])
def test_nothing_else_is_served(path):
    answer = client().get(path)
    assert answer.status_code == 404
    assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]


def test_the_figures_want_the_token():
    asked = client(TOKEN, "peer.example:8900")
    assert asked.get("/").status_code == 200
    assert asked.get("/api/swarm").status_code == 401
    assert asked.get(f"/api/swarm?token={TOKEN}").status_code == 401
    for wrong in (TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", "Bearer \xe9"):
        headers = {"authorization": wrong.encode("latin-1")}
        assert asked.get("/api/swarm", headers=headers).status_code == 401
    answer = asked.get("/api/swarm", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert answer.json()["peers"][0]["peer"] == "w0"
    assert TOKEN not in answer.text


def test_on_loopback_it_answers_under_names_of_this_machine_alone():
    """Or any page that is open in a browser could read along, by a name that leads here."""
    for name in ("127.0.0.1:8900", "localhost:8900", "[::1]:8900"):
        assert client(host=name).get("/api/swarm").status_code == 200
    assert client(host="rebound.example").get("/api/swarm").status_code == 400


@pytest.mark.parametrize(
    ("since", "status", "points"), [("0", 200, 1), ("100.0", 200, 0), ("x", 400, None)]
)
def test_the_history_since_a_time(since, status, points):
    answer = client().get("/api/swarm", params={"since": since})
    assert answer.status_code == status
    if points is not None:
        assert len(answer.json()["points"]["w0"]) == points


def test_the_page_takes_nothing_from_elsewhere_and_no_text_as_markup():
    own = {name: (STATIC / name).read_text() for name in ("page.html", "page.js", "page.css")}
    namespaces = {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    for name, text in own.items():
        assert set(re.findall(r"https?://[^\"' )]+", text)) <= namespaces, name
    assert "MIT" in (STATIC / "uPlot.LICENSE").read_text()
    # All nodes are made by name; these would parse text.
    for parser in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert parser not in own["page.js"]
    assert " style=" not in own["page.html"]
    assert "onclick" not in own["page.html"]


@contextmanager
def serving(place: PagePlace, *, encrypted: bool = False) -> Iterator[PageServer]:
    """A server that has looked at the swarm."""
    looked = threading.Event()

    def look() -> Look:
        if looked.is_set():
            raise TimeoutError("nobody answers any more")
        looked.set()
        return LOOK

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


def test_on_loopback_it_needs_nothing(tmp_path):
    with serving(PagePlace("127.0.0.1:0", tmp_path), encrypted=True) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.token_path is None
        assert "peers" in asked(server.url)
        assert not list(tmp_path.iterdir())


def test_off_loopback_an_encrypted_run_speaks_https_and_wants_the_token(tmp_path):
    Authority.make(tmp_path).new_identity(Role.PEER, "w0").save(tmp_path)
    with serving(PagePlace("0.0.0.0:0", tmp_path), encrypted=True) as server:
        assert server.url.startswith("https://0.0.0.0:")
        assert server.token_path is not None
        with pytest.raises(HTTPError, match="401") as refused:
            asked(server.url)
        refused.value.close()
        assert "peers" in asked(server.url, server.token_path.read_text())


def test_a_later_certificate_is_shown_and_connections_that_ask_nothing_give_way(tmp_path):
    first = (run := Authority.make(tmp_path)).new_identity(Role.PEER, "w0")
    first.save(tmp_path)
    with serving(PagePlace("0.0.0.0:0", tmp_path), encrypted=True) as server, ExitStack() as up:
        address = "127.0.0.1", split_address(urlsplit(server.url).netloc)[1]
        later = run.renew("w0", first.der, first.request())
        Identity.of(first.key, later, first.authority).save(tmp_path)
        server.show_certificate()
        assert ssl.get_server_certificate(address) == later.decode()
        before = len(os.listdir("/proc/self/fd"))
        for said in (b"", b"GET / HTT") * 100:
            up.enter_context(socket.create_connection(address, 60)).sendall(said)
        assert server.token_path is not None
        assert "peers" in asked(server.url, server.token_path.read_text())
        assert len(os.listdir("/proc/self/fd")) <= before + 200 + 64 + 8


def test_a_port_that_is_taken_is_told(tmp_path):
    with serving(PagePlace("127.0.0.1:0", tmp_path)) as server:
        taken = server.url.removeprefix("http://").rstrip("/")
        says = f"^cannot listen on {taken}: .*choose another with --web"
        with pytest.raises(OSError, match=says):
            PageServer(PagePlace(taken, tmp_path), lambda: LOOK, encrypted=False)


def test_the_token_is_kept_for_its_user_alone_and_stays(tmp_path):
    token, path = page_token(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 32
    assert page_token(tmp_path) == (token, path)
    assert page_token(tmp_path / "another")[0] != token


def test_the_token_is_said_on_a_terminal_and_never_logged(tmp_path):
    token, path = page_token(tmp_path)
    event = page_event("https://192.0.2.7:8900/", path)
    assert token not in json.dumps(event)
    assert token not in page_words(event, terminal=False)
    assert str(path) in page_words(event, terminal=False)
    assert page_words(event, terminal=True).endswith(f"https://192.0.2.7:8900/#{token}")
    local = page_event("http://127.0.0.1:8900/", None)
    assert page_words(local, terminal=False).endswith(" http://127.0.0.1:8900/")
