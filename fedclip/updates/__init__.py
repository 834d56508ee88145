# SPDX-License-Identifier: Apache-2.0
"""Clipping of the clients' round updates, with a bound that the server sends."""
