"""Who may read what of the page, and how it is sent."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import protos.web
from protos.web.app import HEADERS, page_app
from protos.web.history import History, Look

STATIC = Path(protos.web.__file__).with_name("static")
TOKEN = "a-secret-of-this-test"
FILES = ("/", "/page.js", "/page.css", "/uplot.js", "/uplot.css")


def client(token: str | None = None, host: str = "127.0.0.1:8900") -> TestClient:
    history = History(2.0)
    document = {"peer": "w0", "members": [{"peer": "w0", "health": "alive"}]}
    history.add(Look(100.0, document, {"w0": document}))
    return TestClient(page_app(history, token), base_url=f"http://{host}")


@pytest.mark.parametrize("path", [*FILES, "/api/swarm"])
def test_everything_is_there_on_loopback(path: str) -> None:
    answer = client().get(path)
    assert answer.status_code == 200
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "set-cookie" not in answer.headers


def test_the_policy_allows_no_code_but_the_pages_own() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/swarm"])
def test_it_is_for_reading_alone(method: str, path: str) -> None:
    assert client().request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/..%2fapp.py", "/static/page.js", "/uPlot.LICENSE", "/api/"])
def test_nothing_else_is_served(path: str) -> None:
    answer = client().get(path)
    assert answer.status_code == 404
    assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]


def test_the_figures_want_the_token() -> None:
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


def test_on_loopback_it_answers_under_names_of_this_machine_alone() -> None:
    """Or any page that is open in a browser could read along, by a name that leads here."""
    for name in ("127.0.0.1:8900", "localhost:8900", "[::1]:8900"):
        assert client(host=name).get("/api/swarm").status_code == 200
    assert client(host="rebound.example").get("/api/swarm").status_code == 400


@pytest.mark.parametrize(
    ("since", "status", "points"), [("0", 200, 1), ("100.0", 200, 0), ("x", 400, None)]
)
def test_the_history_since_a_time(since: str, status: int, points: int | None) -> None:
    answer = client().get("/api/swarm", params={"since": since})
    assert answer.status_code == status
    if points is not None:
        assert len(answer.json()["points"]["w0"]) == points


def test_the_page_takes_nothing_from_elsewhere_and_no_text_as_markup() -> None:
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
