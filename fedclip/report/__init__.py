# SPDX-License-Identifier: Apache-2.0
"""The records of the clippers in an experiment, read from declearn's checkpoints.

The state of a clipper holds a record of each round, and declearn's `Checkpointer` saves the state
of every node's optimizer, and loss and metrics after each evaluation. You do not need to switch
anything on, and may read a run while it goes on.

1. `reading`: every folder below the given one that holds ``optimizer_state_*.mpk`` is a node.
2. `norms` and `findings`: unusual norms, and what the rounds show, in sentences.
3. `text` and `page`: tables, CSV, JSON, and a page for a browser.

A damaged file is skipped, and the report names it. Names of nodes, clippers and groups are other
people's text: they are shown unchanged, never read as markup.
"""

from fedclip.report.page import page_of
from fedclip.report.reading import Reader, read_report
from fedclip.report.rows import ReportError, Row, number, printable
from fedclip.report.text import Report

__all__ = [
    "Reader",
    "Report",
    "ReportError",
    "Row",
    "number",
    "page_of",
    "printable",
    "read_report",
]
