# SPDX-License-Identifier: Apache-2.0
"""From the norms of an experiment to a decision: what to clip first, and why."""

from fedclip.cli.suggest.ranking import advised, in_words

__all__ = ["advised", "in_words"]
