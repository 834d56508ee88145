# SPDX-License-Identifier: Apache-2.0
"""Three hospitals train one model, and one of them has trouble with its units.

``data.py`` makes the hospitals, ``node.py`` is one process of the federations, ``run.py`` starts
them, watches them and shows what came out. Nothing in the numbers is prepared: they are those of
the run.
"""

from fedclip.tools.demo.run import DemoError, Way, run_demo, ways

__all__ = ["DemoError", "Way", "run_demo", "ways"]
