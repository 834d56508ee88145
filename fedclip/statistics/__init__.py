# SPDX-License-Identifier: Apache-2.0
"""Statistics of norms that all clients of a federation share."""
