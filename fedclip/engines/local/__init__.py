# SPDX-License-Identifier: Apache-2.0
"""A federation in one process, with as many clients as you name."""
