# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: records clipped one by one, noise on their sum, a budget that the client keeps."""
