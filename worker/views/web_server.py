"""A web server on a thread of its own: of the page, and of the figures that Prometheus reads."""

import asyncio
import socket
import ssl
import threading
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from murmuration.protos.addresses import join_address, split_address
from murmuration.protos.reach import cannot_listen
from murmuration.worker.identity import FOLDER

_AT_ONCE = 64  # connections
_END_S = 5.0
_REQUEST_S = 15.0  # a connection that begins no request in it, or in twice as long, is closed


class _WebConnection(H11Protocol):
    """One connection, which holds an open file: it is closed where there are too many, or where it
    asks nothing."""

    _before: RequestResponseCycle | None = None  # its request at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _AT_ONCE:
            transport.close()
        else:
            self.loop.call_later(_REQUEST_S, self._look)

    def _look(self) -> None:
        if self.cycle is self._before:
            self.transport.close()
        else:
            self._before = self.cycle
            self.loop.call_later(_REQUEST_S, self._look)


class WebServer:
    """Serves an application until closed.

    Args:
        option: the option of the command line that names the address.
        address: HOST:PORT; port 0 takes a free one.
        folder: the folder with the certificate to speak HTTPS with; None: HTTP.

    Attributes:
        url: of the root, with a slash at its end.

    Raises:
        OSError: it cannot listen there, or there is no certificate; says how to go on.
    """

    def __init__(self, option: str, address: str, app: ASGIApp, folder: Path | None = None) -> None:
        host, port = split_address(address)
        try:
            self._socket = _bound(host, port)
        except OSError as error:
            raise OSError(cannot_listen(option, address, error)) from error
        config = uvicorn.Config(
            app,
            log_config=None,  # requests are logged nowhere
            access_log=False,
            server_header=False,
            limit_concurrency=_AT_ONCE,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=1,
            http=_WebConnection,
            ws="none",
            loop="asyncio",
        )
        config.load()
        if folder is not None:
            config.ssl = _tls(folder)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=f"murmur {option}", daemon=True)
        self._thread.start()
        scheme = "http" if folder is None else "https"
        self.url = f"{scheme}://{join_address(host, self._socket.getsockname()[1])}/"

    def close(self) -> None:
        """Serves no more, and frees the port."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))


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
