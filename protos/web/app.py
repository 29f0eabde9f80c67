"""The routes of the page, and who may read them.

The files of the page hold nothing of the run. What does is below /api/, as JSON, for GET alone. On
loopback it is there for this machine, and only under names of this machine: a name that somebody
else points here would let any page that is open in a browser read along. Elsewhere it wants a
token.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.web.history import History

_STATIC = Path(__file__).with_name("static")
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uplot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
_THIS_MACHINE = ["127.0.0.1", "localhost", "[::1]"]
_SCHEME = "Bearer "
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


def page_app(
    history: History,
    token: str | None,
    beside: Callable[[], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """The application.

    Args:
        token: that a reader of the figures shows; None: whoever is on this machine may read them.
        beside: what runs while it serves.
    """

    async def swarm(request: Request) -> Response:
        if token is not None and not _is_shown(request, token):
            return JSONResponse({"error": "it wants the page's token"}, 401)
        try:
            since_s = float(request.query_params.get("since", "0"))
        except ValueError:
            return JSONResponse({"error": "since: seconds since 1970"}, 400)
        return JSONResponse(history.since(since_s))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if beside is None:
            yield
            return
        async with beside():
            yield

    hosts = _THIS_MACHINE if token is None else ["*"]
    return Starlette(
        routes=[
            *(Route(path, _served(*file), methods=["GET"]) for path, file in _FILES.items()),
            Route("/api/swarm", swarm, methods=["GET"]),
        ],
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=3),
        ],
        lifespan=lifespan,
    )


def _served(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_request: Request) -> Response:
        return FileResponse(_STATIC / name, media_type=media_type)

    return serve


def _is_shown(request: Request, token: str) -> bool:
    """Compared in the same time wherever it differs."""
    shown = request.headers.get("authorization", "")
    given = shown.removeprefix(_SCHEME) if shown.startswith(_SCHEME) else ""
    return hmac.compare_digest(given.encode(), token.encode())


class _Headers:
    """What every answer says, refusals too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                pairs = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        await self._app(scope, receive, sent)
