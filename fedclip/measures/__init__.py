# SPDX-License-Identifier: Apache-2.0
"""The size of gradients: the L2 norm, other orders, and the distribution of past norms.

The functions here only read arrays.
"""

from fedclip.measures.l2 import UNCERTAINTY, Float64, Numbers, all_finite, exact_norm, l2_norms
from fedclip.measures.orders import (
    MEANS,
    Order,
    check_order,
    degree,
    lowered,
    measure,
    slice_measures,
)

__all__ = [
    "MEANS",
    "UNCERTAINTY",
    "Float64",
    "Numbers",
    "Order",
    "all_finite",
    "check_order",
    "degree",
    "exact_norm",
    "l2_norms",
    "lowered",
    "measure",
    "slice_measures",
]
