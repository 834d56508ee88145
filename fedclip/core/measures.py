# SPDX-License-Identifier: Apache-2.0
"""The size of gradients in any order, and the distribution of past norms; arrays are only read."""

from fedclip.arrays import Float64 as Float64
from fedclip.core.orders import MEANS as MEANS
from fedclip.core.orders import SQUARED as SQUARED
from fedclip.core.orders import Order as Order
from fedclip.core.orders import check_order as check_order
from fedclip.core.orders import measure as measure
from fedclip.core.orders import sizes_of as sizes_of
from fedclip.core.orders import slice_measures as slice_measures
from fedclip.core.orders import spread_of as spread_of
from fedclip.core.orders import total as total
