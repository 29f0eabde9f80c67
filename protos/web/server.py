"""Looks at the swarm every two seconds, keeps what it sees, and serves the page."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvicorn

from protos.addresses import is_loopback, join_address, split_address
from protos.identity import FOLDER
from protos.reach import cannot_listen
from protos.web.app import page_app
from protos.web.history import History, Look
from protos.web.place import PagePlace, page_token

EVERY_S = 2.0
PEERS_PER_S = 32  # a large swarm is asked less often
_AT_ONCE = 64  # connections
_END_S = 5.0


class PageServer:
    """Serves the page from a thread of its own, until closed.

    Args:
        look: asks the swarm; called on a thread of this server's. May raise OSError, RuntimeError
            or TimeoutError when nobody answers: the page then shows what was last seen.
        encrypted: whether to speak HTTPS off loopback, with the certificate in the folder.

    Attributes:
        url: of the page, without its token.
        token_path: the file with what readers have to show; None on loopback.

    Raises:
        OSError: it cannot listen there, or the token cannot be kept; says how to go on.
    """

    def __init__(self, place: PagePlace, look: Callable[[], Look], *, encrypted: bool) -> None:
        host, port = split_address(place.address)
        public = not is_loopback(host)
        token: str | None = None
        self.token_path: Path | None = None
        if public:
            token, self.token_path = page_token(place.folder)
        self._look, self.history = look, History(EVERY_S)
        try:
            self._socket = _bound(host, port)
        except OSError as error:
            raise OSError(cannot_listen("--web", place.address, error)) from error
        secure = encrypted and public
        config = uvicorn.Config(
            page_app(self.history, token, self._looking),
            log_config=None,  # requests are logged nowhere
            access_log=False,
            server_header=False,
            limit_concurrency=_AT_ONCE,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=1,
            lifespan="on",
            http="h11",
            ws="none",
            loop="asyncio",
        )
        config.load()
        if secure:
            config.ssl = _tls(place.folder)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="murmur-page", daemon=True)
        self._thread.start()
        bound = self._socket.getsockname()[1]
        self.url = f"http{'s' if secure else ''}://{join_address(host, bound)}/"

    def close(self) -> None:
        """Serves no more, and frees the port."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look_on())
        yield
        task.cancel()

    async def _look_on(self) -> None:
        while True:
            began_s = time.monotonic()
            peers = 0
            with suppress(OSError, RuntimeError, TimeoutError):
                look = await asyncio.to_thread(self._look)
                self.history.add(look)
                peers = len(look.answers)
            pause_s = max(EVERY_S, peers / PEERS_PER_S)
            await asyncio.sleep(max(0.1, began_s + pause_s - time.monotonic()))


def _bound(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


def _tls(folder: Path) -> ssl.SSLContext:
    """Raises OSError: there is no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / FOLDER / "certificate.pem", folder / FOLDER / "key.pem")
    return context
