# SPDX-License-Identifier: Apache-2.0
"""Update clipping in NVFlare, around any of its recipes that send differences."""
