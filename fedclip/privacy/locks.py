# SPDX-License-Identifier: Apache-2.0
"""Locks on files, which end with their process at the latest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

__all__ = ["locked"]


def locked(path: Path, *, wait: bool) -> IO[str]:
    """Return a file that no other process has locked, made if needed; closing it ends the lock.

    Raises
    ------
    OSError
        If it cannot be locked; or, without `wait`, at once if somebody else has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whoever may read it could hold it, too.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        file.close()
        raise
    return file
