# SPDX-License-Identifier: Apache-2.0
"""The policy of a site: which updates, numbers and votes may leave it, for any engine."""
