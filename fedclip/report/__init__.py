# SPDX-License-Identifier: Apache-2.0
"""What the clippers of an experiment did: read from declearn's checkpoints, while it runs or after.

The state of a clipper holds a record of each round, and declearn's `Checkpointer` saves the state
of every node's optimizer, and loss and metrics after each evaluation. So there is nothing to switch
on, send or log:

1. `reading`: every folder below the given one that holds ``optimizer_state_*.mpk`` is a node.
   `curves` reads the loss and the metrics beside them.
2. `words`: what the rounds show, in sentences; by `place` and `seeing` whose norms are unlike
   the others'.
3. The rest is presentation: `table`, `figure`, `page`, CSV and JSON.

A damaged file is skipped, and the report names it. Names of nodes, clippers and groups are other
people's text: they are shown as they are, never read as markup.
"""

from fedclip.core.records import ALL
from fedclip.report.experiment import Report
from fedclip.report.page import Run, page_of
from fedclip.report.reading import Reader, read_report
from fedclip.report.rows import COLUMNS, ReportError, Row, number, pooled, printable

__all__ = [
    "ALL",
    "COLUMNS",
    "Reader",
    "Report",
    "ReportError",
    "Row",
    "Run",
    "number",
    "page_of",
    "pooled",
    "printable",
    "read_report",
]
