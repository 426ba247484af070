"""Sockets of the servers, and their URLs. Little is imported: a run with --watch plans the memory of its page."""

import socket

from packtrain.common.errors import InputError


def bind_socket(
    host: str, port: int, flags: str, *, backlog: int, idle_seconds: float
) -> socket.socket:
    """Open a socket that listens at an address, and drops clients that take nothing for `idle_seconds`.

    flags    command line that asks for the address, for messages. Raises InputError.
    backlog  most connections that may wait to be accepted
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise InputError(f"{flags}: cannot listen there: {reason}", "use another port") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connections inherit it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * idle_seconds))
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the URL of the address at which a socket listens, without a slash at its end."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
