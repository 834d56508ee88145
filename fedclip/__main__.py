# SPDX-License-Identifier: Apache-2.0
"""``python -m fedclip``: the command line, where the script is not on the path."""

from fedclip.cli.main import main

if __name__ == "__main__":
    main()
