# SPDX-License-Identifier: Apache-2.0
"""The size of gradients: the L2 norm, other orders, and the distribution of past norms.

Everything here reads arrays, and never writes to one.
"""

from fedclip.measures.l2 import UNCERTAINTY, Float64, Numbers, exact_norm, l2_norms
from fedclip.measures.orders import Order, check_order, degree, measure, slice_measures

__all__ = [
    "UNCERTAINTY",
    "Float64",
    "Numbers",
    "Order",
    "check_order",
    "degree",
    "exact_norm",
    "l2_norms",
    "measure",
    "slice_measures",
]
