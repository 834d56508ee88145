# SPDX-License-Identifier: Apache-2.0
"""The command ``fedclip``, and ``python -m fedclip``: the command line, if it is installed."""

from __future__ import annotations

import sys

from fedclip.errors import NEEDS_CLI, OF_CLI


def main() -> None:
    """Run the command line, or print how to install it."""
    try:
        from fedclip.cli.main import main as run
    except ImportError as error:
        if error.name not in OF_CLI:
            raise
        sys.exit(f"fedclip: the command line {NEEDS_CLI}")
    run()


if __name__ == "__main__":
    main()
