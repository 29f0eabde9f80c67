"""A headless Chromium, where one is installed: what a page shows, as its nodes."""

import shutil
import subprocess
import tempfile
from html.parser import HTMLParser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_SHOWN_MS = 6_000  # of the page's own time: three questions for news
_PATIENCE_S = 120.0
_QUIET = ["gpu", "quic", "background-networking", "component-update", "dev-shm-usage", "sync"]
_OPTIONS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"),
    *("--ignore-certificate-errors", f"--virtual-time-budget={_SHOWN_MS}"),
    *(f"--disable-{each}" for each in _QUIET),
)


def shown(url: str) -> "Page":
    """The nodes of a page after some seconds of its own time."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="murmur-chromium-") as folder:
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "--dump-dom", url]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
    return Page(done.stdout)


class Node:
    """An element, with the text of all that is in it."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes, self.text = tag, attributes, ""

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())


class Page(HTMLParser):
    """All elements of a page, in their order."""

    _EMPTY = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._open: list[Node] = []
        self.feed(text)

    def of(self, tag: str, kind: str = "", **attributes: str) -> list[Node]:
        """Those with this tag, of this class, with these attributes (`data_peer` is data-peer)."""
        wanted = {key.replace("_", "-"): value for key, value in attributes.items()}
        return [
            node
            for node in self.nodes
            if node.tag == tag
            and (not kind or kind in node.classes)
            and wanted.items() <= node.attributes.items()
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {key: value or "" for key, value in attrs})
        self.nodes.append(node)
        if tag not in self._EMPTY:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        if any(node.tag == tag for node in self._open):
            while self._open.pop().tag != tag:
                pass

    def handle_data(self, data: str) -> None:
        for node in self._open:
            node.text += data
