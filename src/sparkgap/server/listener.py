"""The socket that the server listens on. Imports no HTTP library, so that a port in use is told at once."""

import socket

from sparkgap.errors import ConfigError
from sparkgap.server.settings import ServerSettings

BACKLOG = 512
"""Connections that may wait to be accepted."""


def bind(settings: ServerSettings) -> socket.socket:
    """A socket that the server will listen on.

    Raises:
        ConfigError: the address is in use, or is none of this machine's.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {where}: {error}; check --host") from error
    try:
        # A port whose last connections are still being closed can be taken again, one that is listened on cannot.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --port or --host") from error
    return listener
