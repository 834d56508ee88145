# SPDX-License-Identifier: Apache-2.0
"""The tools for users: the command line, checks of configurations, and the demo."""
