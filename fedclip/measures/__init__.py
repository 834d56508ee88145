# SPDX-License-Identifier: Apache-2.0
"""The size of gradients: the L2 norm, other orders, and the distribution of past norms.

The functions here only read arrays.
"""

from fedclip.measures.l2 import FEW as FEW
from fedclip.measures.l2 import UNCERTAINTY as UNCERTAINTY
from fedclip.measures.l2 import Float64 as Float64
from fedclip.measures.l2 import Numbers as Numbers
from fedclip.measures.l2 import all_finite as all_finite
from fedclip.measures.l2 import exact_norm as exact_norm
from fedclip.measures.l2 import l2_norms as l2_norms
from fedclip.measures.orders import MEANS as MEANS
from fedclip.measures.orders import Order as Order
from fedclip.measures.orders import check_order as check_order
from fedclip.measures.orders import degree as degree
from fedclip.measures.orders import lowered as lowered
from fedclip.measures.orders import measure as measure
from fedclip.measures.orders import measure_on_device as measure_on_device
from fedclip.measures.orders import slice_measures as slice_measures
