# SPDX-License-Identifier: Apache-2.0
"""What people run: the command line, checks of configurations, and the demo."""
