# SPDX-License-Identifier: Apache-2.0
"""Federated engines that use the same clippers and updates: declearn, Flower, NVFlare, and one process."""
