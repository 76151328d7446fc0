"""The sockets of the server: bound before anything else is done, so that a port in use is said at once."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl

from nibble.errors import ConfigError, NibbleError
from nibble.server.settings import Settings

BACKLOG = 2048
"""Connections that wait to be accepted."""
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(settings: Settings) -> list[socket.socket]:
    """Return sockets that listen at every address of the host.

    Raises:
        ConfigError: the host has no address of this machine.
        NibbleError: the port is in use, or may not be used.
    """
    host, port = settings.host, settings.port
    try:
        entries = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"there is no host {host!r} ({error.strerror}): --host takes an address") from None
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, kind, protocol, _, address in dict.fromkeys(entries):
            try:
                sockets.append(opened.enter_context(_listening(family, kind, protocol, address)))
            except OSError as error:
                # A name may have addresses of several kinds, and the machine only one of these.
                if error.errno not in NO_SUCH_ADDRESS:
                    raise NibbleError(_explain(error, host, port)) from None
        if not sockets:
            raise ConfigError(f"{host} is no address of this machine: --host takes one, or 0.0.0.0 for all")
        opened.pop_all()
    return sockets


def _listening(family: int, kind: int, protocol: int, address: object) -> socket.socket:
    """Return a socket that listens."""
    listener = socket.socket(family, kind, protocol)
    try:
        # Connections of a server that has ended do not keep the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)  # type: ignore[arg-type]
        # Two sockets may be bound to a port; only one listens.
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: name another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used ({error.strerror}): name one from 1024 on with --port"
    return f"cannot listen at {host}, port {port}: {error.strerror}"


def url_of(settings: Settings, sockets: list[socket.socket]) -> str:
    """Return where clients reach the server. Its port is the socket's: 0 in the settings means any."""
    scheme = "https" if settings.ssl_certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{sockets[0].getsockname()[1]}{settings.root_path}"


def check_tls(settings: Settings) -> None:
    """Raise ConfigError where the files of TLS cannot be used."""
    if not settings.ssl_certfile:
        return
    files = ", ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password would be asked for at the terminal, which a server has none of.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
        if settings.ssl_ca_certs:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"TLS cannot be had with {files}: {error}; --ssl-certfile and --ssl-keyfile are PEM files of a certificate "
            "and of its key, without a password"
        ) from None
