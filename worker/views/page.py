"""A web server on a thread of its own, which Prometheus reads from too; and the page of a swarm.

The figures are below /api/, as JSON: docs/adr/0024 says who may read them.
"""

import asyncio
import hmac
import secrets
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from murmuration.protos.addresses import is_loopback, join_address, split_address
from murmuration.protos.reach import cannot_listen
from murmuration.worker.identity.certificates import FOLDER, check_private, read_kept, write_secret
from murmuration.worker.views import PagePlace
from murmuration.worker.views.history import History, Look

THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]")  # as the host of a URL
_AT_ONCE = 64  # connections
_END_S = 5.0
EVERY_S = 2.0
PEERS_PER_S = 32  # a large swarm is asked less often
_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
_SCHEME = "Bearer "
_TOKEN = "page-token"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class _Listening(socket.socket):
    """Has 64 connections at most, handshakes too: the oldest gives way to the next."""

    def __init__(self, made: socket.socket) -> None:
        super().__init__(made.family, made.type, made.proto, made.detach())
        self._open: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        found, address = super().accept()
        self._open = [each for each in self._open if each.fileno() >= 0]  # else it was closed
        if len(self._open) >= _AT_ONCE:
            with suppress(OSError):  # its other side has gone
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        self._open.append(found)
        return found, address


class WebServer:
    """Serves an application until closed. Raises OSError, which says how to go on: it cannot listen
    there, or there is no certificate. Args: option: of the command line, that names the address;
    address: HOST:PORT; port 0 takes a free one; folder: with the certificate to speak HTTPS with;
    None: HTTP. Attributes: url: of the root, with a slash at its end."""

    def __init__(self, option: str, address: str, app: ASGIApp, folder: Path | None = None) -> None:
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            made = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise OSError(cannot_listen(option, address, error)) from error
        self._socket = _Listening(made)
        config = uvicorn.Config(
            app,
            log_config=None,  # requests are logged nowhere
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=1,
            http="h11",
            ws="none",
            loop="asyncio",
        )
        config.load()
        self._folder, self._server = folder, uvicorn.Server(config)
        if folder is not None:
            config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.show_certificate()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self._socket])),
            name=f"murmur {option}",
            daemon=True,
        )
        self._thread.start()
        scheme = "http" if folder is None else "https"
        self.url = f"{scheme}://{join_address(host, self._socket.getsockname()[1])}/"

    def show_certificate(self) -> None:
        """New connections have that in the folder, which may be renewed. Raises OSError."""
        if self._folder is not None and (tls := self._server.config.ssl) is not None:
            kept = self._folder / FOLDER
            tls.load_cert_chain(kept / "certificate.pem", kept / "key.pem")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._socket.close()


def page_app(
    history: History,
    token: str | None,
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> Starlette:
    """Args: token: that a reader of the figures shows; None: anybody on this machine may read them;
    beside: what runs while it serves."""

    async def swarm(request: Request) -> Response:
        if token is not None:
            shown = request.headers.get("authorization", "")
            given = shown.removeprefix(_SCHEME) if shown.startswith(_SCHEME) else ""
            # Compared in the same time wherever it differs.
            if not hmac.compare_digest(given.encode(), token.encode()):
                return JSONResponse({"error": "it wants the page's token"}, 401)
        try:
            since_s = float(request.query_params.get("since", "0"))
        except ValueError:
            return JSONResponse({"error": "since: seconds since 1970"}, 400)
        return JSONResponse(history.since(since_s))

    async def file(request: Request) -> Response:
        name, media_type = _FILES[request.scope["path"]]
        return FileResponse(_STATIC / name, media_type=media_type)

    hosts = [*THIS_MACHINE] if token is None else ["*"]
    return Starlette(
        routes=[
            *(Route(path, file, methods=["GET"]) for path in _FILES),
            Route("/api/swarm", swarm, methods=["GET"]),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=3),
        ],
        lifespan=lambda _app: beside(),
    )


async def _with_headers(request: Request, answer: RequestResponseEndpoint) -> Response:
    response = await answer(request)
    response.headers.update(HEADERS)
    return response


class PageServer(WebServer):
    """Serves the page until closed. Raises OSError: it cannot listen there, or the token cannot be
    kept. Args: look: asks the swarm, on a thread of this server's. It may raise OSError,
    RuntimeError or TimeoutError: the page then shows what was last seen; encrypted: whether to
    speak HTTPS off loopback. Attributes: token_path: the file with what readers have to show; None
    on loopback."""

    def __init__(self, place: PagePlace, look: Callable[[], Look], *, encrypted: bool) -> None:
        public = not is_loopback(split_address(place.address)[0])
        kept = page_token(place.folder) if public else None
        self.token_path = kept and kept[1]
        self._look, self.history = look, History(EVERY_S)
        app = page_app(self.history, kept and kept[0], self._looking)
        certified = place.folder if encrypted and public else None
        super().__init__("--web", place.address, app, certified)

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[None]:
        async def look_on() -> None:
            while True:
                began_s, peers = time.monotonic(), 0
                with suppress(OSError, RuntimeError, TimeoutError):
                    look = await asyncio.to_thread(self._look)
                    self.history.add(look)
                    peers = len(look.answers)
                    self.show_certificate()
                pause_s = max(EVERY_S, peers / PEERS_PER_S)
                await asyncio.sleep(max(0.1, began_s + pause_s - time.monotonic()))

        task = asyncio.create_task(look_on())
        yield
        task.cancel()


def page_token(folder: Path) -> tuple[str, Path]:
    path = folder / FOLDER / _TOKEN
    if path.exists():
        check_private(path)
        if kept := read_kept(path).decode("ascii", "replace").strip():
            return kept, path
    token = secrets.token_urlsafe(24)
    write_secret(path, token.encode())
    return token, path
