# SPDX-License-Identifier: Apache-2.0
"""Whether a server could listen on a port of this machine."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["port_is_free"]


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there; True as well where `host` can not be resolved."""
    with contextlib.suppress(socket.gaierror), socket.socket() as sock:
        # Set this option as the server does: a port that only waits for its time-out is free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except socket.gaierror:
            raise
        except OSError:
            return False
    return True
