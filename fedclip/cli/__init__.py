# SPDX-License-Identifier: Apache-2.0
"""The command line: checks of configurations, runs, reports, privacy budgets, the demo."""
