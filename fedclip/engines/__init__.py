# SPDX-License-Identifier: Apache-2.0
"""Federated engines, which use the same clippers and updates: declearn, Flower, NVFlare, local."""
