"""The certificate that a server of gRPC shows, which may be renewed while it serves."""

import time
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from murmuration.worker.identity.certificates import Identity

_HANDSHAKES_BEGIN_S = 0.25  # a handshake begins within microseconds, where it is not held up


class ServerCertificate:
    """The certificate of one server. A caller must have one of the same authority."""

    def __init__(self, shown: "Identity") -> None:
        self._first = shown
        self._renewed: Identity | None = None  # that the server does not show yet

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._first),
            self._renewed_configuration,  # type: ignore[arg-type]  # None is in its docs
            require_client_authentication=True,
        )

    def renew(self, shown: "Identity") -> None:
        """New connections are made with this one; those that there are stay. any thread."""
        self._renewed = shown

    def _renewed_configuration(self) -> "grpc.ServerCertificateConfiguration | None":
        """Asked at each handshake, on a thread of gRPC's; None: the server keeps what it has.

        gRPC frees what it had at once, though a handshake on another thread may be about to begin
        with it: that ended the process (grpc/grpc#36693). While this call waits, those can begin.
        """
        renewed, self._renewed = self._renewed, None
        if renewed is None:
            return None
        time.sleep(_HANDSHAKES_BEGIN_S)
        return _configuration(renewed)


def _configuration(own: "Identity") -> "grpc.ServerCertificateConfiguration":
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authority)
