# SPDX-License-Identifier: Apache-2.0
"""Three hospitals train one model, and one of them has trouble with its units.

``data.py`` makes the hospitals, ``run.py`` runs the federations and shows what came out. Nothing in
the numbers is prepared: they are those of the run.
"""

from fedclip.cli.demo.run import run_demo

__all__ = ["run_demo"]
