# SPDX-License-Identifier: Apache-2.0
"""The parts for a whole federation: common statistics, and the clients' round updates."""
