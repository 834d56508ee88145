# SPDX-License-Identifier: Apache-2.0
"""Update clipping in Flower, around any of its strategies."""
