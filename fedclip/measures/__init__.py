# SPDX-License-Identifier: Apache-2.0
"""The size of gradients in any order, and the distribution of past norms; arrays are only read."""

from fedclip.arrays import Float64 as Float64
from fedclip.measures.orders import MEANS as MEANS
from fedclip.measures.orders import Order as Order
from fedclip.measures.orders import check_order as check_order
from fedclip.measures.orders import degree as degree
from fedclip.measures.orders import measure as measure
from fedclip.measures.orders import sizes_of as sizes_of
from fedclip.measures.orders import slice_measures as slice_measures
from fedclip.measures.orders import spread_of as spread_of
from fedclip.measures.orders import total as total
