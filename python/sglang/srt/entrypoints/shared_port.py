"""One port that several processes listen on; the system deals connections out to them."""

from __future__ import annotations

import socket
from typing import Final

from sglang.srt.entrypoints.prepare import StartError

_BACKLOG: Final = 2048


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that does not listen yet; ``shared``: with others of the same port.

    Raises:
        OSError: it can't be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(address)
    return listener


def bind_shared(host: str, port: int) -> socket.socket:
    """
    Raises:
        StartError: it can't be had.
    """
    try:
        return bind(host, port, shared=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(
            f"can't share {host}:{port} between processes: {reason}; leave --tokenizer-worker-num out,"
            " or choose another port with --port"
        ) from error


def open_shared(listener: socket.socket) -> None:
    listener.listen(_BACKLOG)


def shared_instead(alone: socket.socket) -> socket.socket:
    """A socket that holds the port and does not listen, in place of one that others can't share.

    ``alone`` was bound first, so that a port in use was an error before a model was loaded.

    Raises:
        StartError: it can't be had.
    """
    host, port = alone.getsockname()[:2]
    alone.close()
    return bind_shared(host, port)
