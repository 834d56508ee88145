# SPDX-License-Identifier: Apache-2.0
"""What a clipper does to a gradient, one file for each way of looking at it."""
