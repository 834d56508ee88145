# SPDX-License-Identifier: Apache-2.0
"""One process of the demo's federations: ``python -m fedclip.tools.demo.node server|SITE CONFIG…``.

It reads the very files that ``fedclip quickrun`` would run in one process, and takes part in one
after the other. Whoever starts a node holds the other end of its standard input: when that
closes, the node ends, so that no process outlives the demo, however the demo ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path

import fedclip  # noqa: F401  (registers the clippers)
from fedclip.tools.demo.data import SITES
from fedclip.tools.quickrun import Federation

__all__ = ["main"]


def end_with_parent() -> None:
    """End this process when its standard input closes."""
    # Not through sys.stdin: its lock, held here, would stop the interpreter from ending.
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Run the node that the command line names."""
    role, files = sys.argv[1], sys.argv[2:]
    threading.Thread(target=end_with_parent, daemon=True).start()
    for file in files:
        # Every training has a model and logs of its own.
        sys.modules.pop("model", None)
        for name in logging.root.manager.loggerDict:
            if name.startswith("declearn."):
                logging.getLogger(name).handlers.clear()
        federation = Federation(Path(file))
        if role == "server":
            asyncio.run(federation.serve())
        else:
            asyncio.run(federation.take_part(role, seed=SITES.index(role)))


if __name__ == "__main__":
    main()
